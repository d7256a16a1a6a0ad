// The Python face of fastcore.native. Each algorithm file has its own register_* function here and
// knows no Python itself; long calls release the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "detokenizer.h"

namespace nb = nanobind;
using namespace nb::literals;

// ---- detokenizer.h ---------------------------------------------------------------------------------------

namespace {

nb::str to_str(std::string_view utf8) { return nb::str(utf8.data(), utf8.size()); }

std::shared_ptr<aioengine::Vocabulary> make_vocabulary(nb::list tokens, nb::bytes flags,
                                                       bool strip_first_space) {
    if (flags.size() != tokens.size()) throw nb::value_error("flags must have one byte per token");
    auto vocabulary = std::make_shared<aioengine::Vocabulary>(strip_first_space);
    for (size_t i = 0; i < tokens.size(); ++i) {
        const nb::bytes token = nb::cast<nb::bytes>(tokens[i]);
        vocabulary->append({token.c_str(), token.size()}, static_cast<uint8_t>(flags.c_str()[i]));
    }
    return vocabulary;
}

// Ids of a list; the stream owns no reference to it.
template <typename Take>
void for_each_id(nb::list ids, Take take) {
    for (nb::handle item : ids) {
        const long long id = PyLong_AsLongLong(item.ptr());
        if (id == -1 && PyErr_Occurred()) nb::raise_python_error();
        if (!take(id)) return;
    }
}

nb::str decode(const aioengine::Vocabulary& vocabulary, nb::list ids, bool skip_special_tokens,
               bool spaces_between_special_tokens) {
    aioengine::TextOptions options;
    options.skip_special_tokens = skip_special_tokens;
    options.spaces_between_special_tokens = spaces_between_special_tokens;
    options.strip_first_space = true;
    // The stream lives only inside this call, so it borrows the vocabulary.
    aioengine::TextStream stream({std::shared_ptr<void>(), &vocabulary}, nullptr, options);
    for_each_id(ids, [&](int64_t id) {
        stream.push(id);
        return true;
    });
    stream.finish();
    return to_str(stream.text());
}

void register_detokenizer(nb::module_& m) {
    using aioengine::StopSet;
    using aioengine::TextOptions;
    using aioengine::TextStream;
    using aioengine::Vocabulary;

    nb::class_<Vocabulary>(m, "Vocabulary")
        .def(nb::new_(&make_vocabulary), "tokens"_a, "flags"_a, "strip_first_space"_a = false)
        .def_ro_static("SPECIAL", &Vocabulary::kSpecial)
        .def_ro_static("ADDED", &Vocabulary::kAdded)
        .def("__len__", &Vocabulary::size)
        .def("token_bytes",
             [](const Vocabulary& self, int64_t id) {
                 const std::string_view bytes = self.bytes(id);
                 return nb::bytes(bytes.data(), bytes.size());
             },
             "token_id"_a)
        .def("decode", &decode, "token_ids"_a, "skip_special_tokens"_a = true,
             "spaces_between_special_tokens"_a = true);

    nb::class_<StopSet>(m, "StopSet").def(nb::init<const std::vector<std::string>&>(), "stops"_a);

    nb::class_<TextStream>(m, "TextStream")
        .def(nb::new_([](std::shared_ptr<Vocabulary> vocabulary, std::shared_ptr<StopSet> stops,
                         bool skip_special_tokens, bool spaces_between_special_tokens, bool include_stop,
                         int64_t min_tokens, bool strip_first_space) {
                 TextOptions options;
                 options.skip_special_tokens = skip_special_tokens;
                 options.spaces_between_special_tokens = spaces_between_special_tokens;
                 options.include_stop = include_stop;
                 options.strip_first_space = strip_first_space;
                 options.min_tokens = min_tokens;
                 return new TextStream(std::move(vocabulary), std::move(stops), options);
             }),
             "vocabulary"_a.none(), "stops"_a.none() = nb::none(), nb::kw_only(), "skip_special_tokens"_a = true,
             "spaces_between_special_tokens"_a = true, "include_stop"_a = false, "min_tokens"_a = 0,
             "strip_first_space"_a = false)
        .def("push",
             [](TextStream& self, nb::list ids) {
                 Py_ssize_t consumed = 0;
                 for_each_id(ids, [&](int64_t id) {
                     ++consumed;
                     return !self.push(id);
                 });
                 return consumed;
             },
             "token_ids"_a)
        .def("push_text", [](TextStream& self, std::string_view text) { return self.push_text(text); }, "text"_a)
        .def("finish", &TextStream::finish, "tail"_a = std::string_view())
        .def("take", [](TextStream& self) { return to_str(self.take()); })
        .def("text_until",
             [](const TextStream& self, size_t num_bytes) { return to_str(self.text().substr(0, num_bytes)); },
             "num_bytes"_a)
        .def_prop_ro("text", [](const TextStream& self) { return to_str(self.text()); })
        .def_prop_ro("num_taken_bytes", &TextStream::taken)
        .def_prop_ro("stop_index", &TextStream::stop);
}

}  // namespace

NB_MODULE(native, m) {
    m.doc() = "CPU kernels, detokenizer and stream completion";
    register_detokenizer(m);
}
