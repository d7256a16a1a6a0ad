// The Python face of fastcore.native. Each algorithm file has its own register_* function here and
// knows no Python itself; long calls release the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "attention.h"
#include "completion.h"
#include "cpu_ops.h"
#include "detokenizer.h"
#include "isa.h"
#include "packed_matrix.h"
#include "qmatmul.h"
#include "sampling.h"
#include "tape.h"
#include "threads.h"

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

// ---- CPU kernels: threads, packed matrices, layer operations, attention ---------------------------------
//
// Tensors come as addresses (tensor.data_ptr()); the caller owns them and has checked their shapes.

namespace {

namespace aio = aioengine;
using Address = uintptr_t;
using NoGil = nb::call_guard<nb::gil_scoped_release>;

void require(bool condition, const std::string& message) {
    if (!condition) throw std::invalid_argument(message);
}

template <class T>
T* pointer(Address address, const char* name) {
    require(address != 0, std::string(name) + " must not be a null address");
    return reinterpret_cast<T*>(address);
}

template <class T>
T* optional_pointer(Address address) {
    return reinterpret_cast<T*>(address);
}

void require_rows(int64_t rows, int64_t dim) {
    require(rows >= 0 && rows <= INT32_MAX && dim > 0 && dim <= INT32_MAX / 4,
            "rows=" + std::to_string(rows) + ", dim=" + std::to_string(dim) + " is not a valid shape");
}

aio::KvType kv_type(int code) {
    require(code >= 0 && code <= 2,
            "kv_dtype=" + std::to_string(code) + " is unknown; use KV_FLOAT32, KV_FLOAT16 or KV_BFLOAT16");
    return aio::KvType(code);
}

void require_heads(int num_heads, int num_kv_heads, int head_dim, int block_size) {
    const std::string given = "num_heads=" + std::to_string(num_heads) + ", num_kv_heads=" +
                              std::to_string(num_kv_heads) + ", head_dim=" + std::to_string(head_dim) +
                              ", block_size=" + std::to_string(block_size);
    require(num_heads > 0 && num_kv_heads > 0 && num_heads % num_kv_heads == 0,
            given + ": num_heads must be a positive multiple of num_kv_heads");
    require(head_dim > 0 && head_dim <= 1024, given + ": head_dim must be in [1, 1024]");
    require(block_size > 0, given + ": block_size must be positive");
}

using WeightBytes = nb::ndarray<const uint8_t, nb::c_contig, nb::device::cpu>;

aio::PackedMatrix pack(const std::string& kind, const WeightBytes& data, int64_t n, int64_t k) {
    nb::gil_scoped_release no_gil;
    return aio::PackedMatrix::pack(kind, data.data(), data.size(), n, k);
}

nb::ndarray<nb::numpy, float, nb::ndim<2>> dequantize(const aio::PackedMatrix& matrix) {
    const size_t n = size_t(matrix.n()), k = size_t(matrix.k());
    float* values = new float[n * k];
    nb::capsule owner(values, [](void* p) noexcept { delete[] static_cast<float*>(p); });
    {
        nb::gil_scoped_release no_gil;
        std::vector<int32_t> ids(n);
        for (size_t i = 0; i < n; ++i) ids[i] = int32_t(i);
        matrix.rows(ids.data(), int(n), values);
    }
    return nb::ndarray<nb::numpy, float, nb::ndim<2>>(values, {n, k}, owner);
}

void rows(const aio::PackedMatrix& matrix, Address ids, int64_t count, Address out) {
    require(count >= 0 && count <= INT32_MAX, "count=" + std::to_string(count) + " must be in [0, 2^31)");
    if (count == 0) return;
    matrix.rows(pointer<const int32_t>(ids, "ids"), int(count), pointer<float>(out, "out"));
}

void matmul(Address x, int64_t m, int64_t ldx, const aio::PackedMatrix& weights, Address bias, Address y, int64_t ldy) {
    require(m >= 0 && m <= INT32_MAX, "m=" + std::to_string(m) + " must be in [0, 2^31)");
    require(ldx >= weights.k(), "ldx=" + std::to_string(ldx) + " is below k=" + std::to_string(weights.k()));
    require(ldy >= weights.n(), "ldy=" + std::to_string(ldy) + " is below n=" + std::to_string(weights.n()));
    if (m == 0) return;
    aio::matmul(pointer<const float>(x, "x"), int(m), ldx, weights, optional_pointer<const float>(bias),
                pointer<float>(y, "y"), ldy);
}

void rms_norm(Address x, Address w, float eps, Address y, int64_t num_rows, int64_t dim) {
    require_rows(num_rows, dim);
    if (num_rows == 0) return;
    aio::rms_norm(pointer<const float>(x, "x"), pointer<const float>(w, "w"), eps, pointer<float>(y, "y"),
                  int(num_rows), int(dim));
}

void add_rms_norm(Address x, Address residual, Address w, float eps, Address y, int64_t num_rows, int64_t dim) {
    require_rows(num_rows, dim);
    if (num_rows == 0) return;
    aio::add_rms_norm(pointer<const float>(x, "x"), pointer<float>(residual, "residual"),
                      pointer<const float>(w, "w"), eps, pointer<float>(y, "y"), int(num_rows), int(dim));
}

template <void (*Operation)(const float*, float*, int, int)>
void gated(Address gate_up, Address y, int64_t num_rows, int64_t dim) {
    require_rows(num_rows, dim);
    if (num_rows == 0) return;
    Operation(pointer<const float>(gate_up, "gate_up"), pointer<float>(y, "y"), int(num_rows), int(dim));
}

void rope_and_cache(Address qkv, int64_t num_tokens, Address positions, Address cos_sin, Address slot_mapping,
                    Address kv_cache, int kv_dtype, Address q_norm, Address k_norm, float eps, Address q_out,
                    int num_heads, int num_kv_heads, int head_dim, int rotary_dim, int block_size) {
    require(num_tokens >= 0 && num_tokens <= INT32_MAX,
            "num_tokens=" + std::to_string(num_tokens) + " must be in [0, 2^31)");
    require_heads(num_heads, num_kv_heads, head_dim, block_size);
    require(rotary_dim >= 0 && rotary_dim <= head_dim && rotary_dim % 2 == 0,
            "rotary_dim=" + std::to_string(rotary_dim) + " must be even and at most head_dim=" +
                std::to_string(head_dim));
    if (num_tokens == 0) return;
    aio::RopeArgs args;
    args.qkv = pointer<const float>(qkv, "qkv");
    args.positions = pointer<const int32_t>(positions, "positions");
    args.cos_sin = pointer<const float>(cos_sin, "cos_sin");
    args.slot_mapping = pointer<const int32_t>(slot_mapping, "slot_mapping");
    args.kv_cache = pointer<void>(kv_cache, "kv_cache");
    args.kv_type = kv_type(kv_dtype);
    args.q_norm = optional_pointer<const float>(q_norm);
    args.k_norm = optional_pointer<const float>(k_norm);
    args.eps = eps;
    args.q_out = pointer<float>(q_out, "q_out");
    args.num_heads = num_heads;
    args.num_kv_heads = num_kv_heads;
    args.head_dim = head_dim;
    args.rotary_dim = rotary_dim;
    args.block_size = block_size;
    aio::rope_and_cache(args, int(num_tokens));
}

void paged_attention(Address q, Address kv_cache, int kv_dtype, Address block_table, int64_t block_table_stride,
                     Address query_start, Address seq_lens, int num_seqs, int num_heads, int num_kv_heads, int head_dim,
                     int block_size, float scale, int window, float softcap, Address out) {
    require_heads(num_heads, num_kv_heads, head_dim, block_size);
    require(num_seqs >= 0 && block_table_stride >= 0 && window >= 0 && softcap >= 0.0f,
            "num_seqs, block_table_stride, window and softcap must not be negative");
    if (num_seqs == 0) return;
    aio::AttentionArgs args;
    args.q = pointer<const float>(q, "q");
    args.kv_cache = pointer<const void>(kv_cache, "kv_cache");
    args.kv_type = kv_type(kv_dtype);
    args.block_table = pointer<const int32_t>(block_table, "block_table");
    args.block_table_stride = block_table_stride;
    args.query_start = pointer<const int32_t>(query_start, "query_start");
    args.seq_lens = pointer<const int32_t>(seq_lens, "seq_lens");
    for (int s = 0; s < num_seqs; ++s) {
        const int queries = args.query_start[s + 1] - args.query_start[s];
        require(queries >= 0 && queries <= args.seq_lens[s],
                "sequence " + std::to_string(s) + " has " + std::to_string(queries) + " queries but seq_len " +
                    std::to_string(args.seq_lens[s]));
        require((args.seq_lens[s] + block_size - 1) / block_size <= block_table_stride,
                "sequence " + std::to_string(s) + " of length " + std::to_string(args.seq_lens[s]) +
                    " does not fit a block table row of " + std::to_string(block_table_stride) + " blocks");
    }
    args.num_heads = num_heads;
    args.num_kv_heads = num_kv_heads;
    args.head_dim = head_dim;
    args.block_size = block_size;
    args.scale = scale;
    args.window = window;
    args.softcap = softcap;
    args.out = pointer<float>(out, "out");
    aio::paged_attention(args, num_seqs);
}

void set_num_threads(int count) {
    require(count >= 1 && count <= aio::kMaxThreads,
            "num_threads=" + std::to_string(count) + " must be in [1, " + std::to_string(aio::kMaxThreads) + "]");
    aio::set_num_threads(count);
}

void register_cpu_kernels(nb::module_& m) {
    m.def("set_num_threads", &set_num_threads, "count"_a, NoGil());
    m.def("num_threads", &aio::num_threads);
    m.def("set_isa", &aio::set_isa, "name"_a);
    m.def("isa", [] { return std::string(aio::current_isa().name); });
    m.def("available_isas", &aio::available_isas);
    m.def("stop_threads", &aio::stop_threads, NoGil());
    nb::module_::import_("atexit").attr("register")(nb::cpp_function(&aio::stop_threads, NoGil()));

    nb::class_<aio::PackedMatrix>(m, "PackedMatrix")
        .def_static("pack", &pack, "kind"_a, "data"_a.noconvert(), "n"_a, "k"_a)
        .def_static("concat", &aio::PackedMatrix::concat, "parts"_a)
        .def_prop_ro("n", &aio::PackedMatrix::n)
        .def_prop_ro("k", &aio::PackedMatrix::k)
        .def_prop_ro("kind", &aio::PackedMatrix::kind)
        .def_prop_ro("nbytes", &aio::PackedMatrix::num_bytes)
        .def("rows", &rows, "ids_ptr"_a, "count"_a, "out_ptr"_a, NoGil())
        .def("dequantize", &dequantize);
    m.def("matmul", &matmul, "x_ptr"_a, "m"_a, "ldx"_a, "weights"_a, "bias_ptr"_a, "y_ptr"_a, "ldy"_a, NoGil());

    m.attr("KV_FLOAT32") = int(aio::KvType::kFloat32);
    m.attr("KV_FLOAT16") = int(aio::KvType::kFloat16);
    m.attr("KV_BFLOAT16") = int(aio::KvType::kBfloat16);
    m.def("rms_norm", &rms_norm, "x_ptr"_a, "w_ptr"_a, "eps"_a, "y_ptr"_a, "rows"_a, "dim"_a, NoGil());
    m.def("add_rms_norm", &add_rms_norm, "x_ptr"_a, "residual_ptr"_a, "w_ptr"_a, "eps"_a, "y_ptr"_a, "rows"_a, "dim"_a,
          NoGil());
    m.def("silu_mul", &gated<aio::silu_mul>, "gate_up_ptr"_a, "y_ptr"_a, "rows"_a, "dim"_a, NoGil());
    m.def("gelu_tanh_mul", &gated<aio::gelu_tanh_mul>, "gate_up_ptr"_a, "y_ptr"_a, "rows"_a, "dim"_a, NoGil());
    m.def("rope_and_cache", &rope_and_cache, "qkv_ptr"_a, "num_tokens"_a, "positions_ptr"_a, "cos_sin_ptr"_a,
          "slot_mapping_ptr"_a, "kv_cache_ptr"_a, "kv_dtype"_a, "q_norm_ptr"_a, "k_norm_ptr"_a, "eps"_a, "q_out_ptr"_a,
          "num_heads"_a, "num_kv_heads"_a, "head_dim"_a, "rotary_dim"_a, "block_size"_a, NoGil());
    m.def("paged_attention", &paged_attention, "q_ptr"_a, "kv_cache_ptr"_a, "kv_dtype"_a, "block_table_ptr"_a,
          "block_table_stride"_a, "query_start_ptr"_a, "seq_lens_ptr"_a, "num_seqs"_a, "num_heads"_a, "num_kv_heads"_a,
          "head_dim"_a, "block_size"_a, "scale"_a, "window"_a, "softcap"_a, "out_ptr"_a, NoGil());
}

// ---- tape: kernel calls recorded once and run for every step ---------------------------------------------
//
// Each method takes the arguments of the kernel of the same name. What a step decides (the number of rows or
// tokens, the addresses of its inputs) is taken from run() instead.

void run_tape(const aio::Tape& tape, int num_tokens, int num_seqs, Address input_ids, Address positions,
              const std::vector<Address>& slot_mappings, const std::vector<Address>& block_tables,
              int64_t block_table_stride, Address query_start, Address seq_lens) {
    require(slot_mappings.size() == tape.num_groups() && block_tables.size() == tape.num_groups(),
            "a step needs the slots and the block table of every group that was recorded");
    require(num_tokens > 0 && num_seqs > 0, "a step needs at least one token and one sequence");
    aio::StepArgs step;
    step.num_tokens = num_tokens;
    step.num_seqs = num_seqs;
    step.input_ids = pointer<const int32_t>(input_ids, "input_ids");
    step.positions = pointer<const int32_t>(positions, "positions");
    for (size_t g = 0; g < tape.num_groups(); ++g) {
        step.slot_mappings.push_back(pointer<const int32_t>(slot_mappings[g], "slot_mapping"));
        step.block_tables.push_back(pointer<const int32_t>(block_tables[g], "block_table"));
    }
    step.block_table_stride = block_table_stride;
    step.query_start = pointer<const int32_t>(query_start, "query_start");
    step.seq_lens = pointer<const int32_t>(seq_lens, "seq_lens");
    tape.run(step);
}

Address address(const void* p) { return reinterpret_cast<Address>(p); }

int group_of(const aio::Tape& tape, Address named) {
    const int group = tape.group_of(reinterpret_cast<const void*>(named));
    require(group >= 0, "a call is recorded with slots or a block table of no group of the tape");
    return group;
}

void register_tape(nb::module_& m) {
    using aio::StepArgs;
    using aio::Tape;
    nb::class_<Tape>(m, "Tape")
        .def(nb::init<>())
        .def("__len__", &Tape::size)
        .def("add_group",
             [](Tape& tape, Address slot_mapping, Address block_table) {
                 tape.add_group(pointer<const void>(slot_mapping, "slot_mapping"),
                                pointer<const void>(block_table, "block_table"));
             },
             "slot_mapping_ptr"_a, "block_table_ptr"_a)
        .def("rows",
             [](Tape& tape, const aio::PackedMatrix& matrix, Address, int64_t, Address out) {
                 tape.add([=](const StepArgs& s) { rows(matrix, address(s.input_ids), s.num_tokens, out); });
             },
             "matrix"_a, "ids_ptr"_a, "count"_a, "out_ptr"_a)
        .def("matmul",
             [](Tape& tape, Address x, int64_t, int64_t ldx, const aio::PackedMatrix& weights, Address bias, Address y,
                int64_t ldy) {
                 tape.add([=](const StepArgs& s) { matmul(x, s.num_tokens, ldx, weights, bias, y, ldy); });
             },
             "x_ptr"_a, "m"_a, "ldx"_a, "weights"_a, "bias_ptr"_a, "y_ptr"_a, "ldy"_a)
        .def("rms_norm",
             [](Tape& tape, Address x, Address w, float eps, Address y, int64_t, int64_t dim) {
                 tape.add([=](const StepArgs& s) { rms_norm(x, w, eps, y, s.num_tokens, dim); });
             },
             "x_ptr"_a, "w_ptr"_a, "eps"_a, "y_ptr"_a, "rows"_a, "dim"_a)
        .def("add_rms_norm",
             [](Tape& tape, Address x, Address residual, Address w, float eps, Address y, int64_t, int64_t dim) {
                 tape.add([=](const StepArgs& s) { add_rms_norm(x, residual, w, eps, y, s.num_tokens, dim); });
             },
             "x_ptr"_a, "residual_ptr"_a, "w_ptr"_a, "eps"_a, "y_ptr"_a, "rows"_a, "dim"_a)
        .def("silu_mul",
             [](Tape& tape, Address gate_up, Address y, int64_t, int64_t dim) {
                 tape.add([=](const StepArgs& s) { gated<aio::silu_mul>(gate_up, y, s.num_tokens, dim); });
             },
             "gate_up_ptr"_a, "y_ptr"_a, "rows"_a, "dim"_a)
        .def("rope_and_cache",
             [](Tape& tape, Address qkv, int64_t, Address, Address cos_sin, Address slots, Address kv_cache,
                int kv_dtype, Address q_norm, Address k_norm, float eps, Address q_out, int num_heads, int num_kv_heads,
                int head_dim, int rotary_dim, int block_size) {
                 const int group = group_of(tape, slots);
                 tape.add([=](const StepArgs& s) {
                     rope_and_cache(qkv, s.num_tokens, address(s.positions), cos_sin, address(s.slot_mappings[group]),
                                    kv_cache, kv_dtype, q_norm, k_norm, eps, q_out, num_heads, num_kv_heads, head_dim,
                                    rotary_dim, block_size);
                 });
             },
             "qkv_ptr"_a, "num_tokens"_a, "positions_ptr"_a, "cos_sin_ptr"_a, "slot_mapping_ptr"_a, "kv_cache_ptr"_a,
             "kv_dtype"_a, "q_norm_ptr"_a, "k_norm_ptr"_a, "eps"_a, "q_out_ptr"_a, "num_heads"_a, "num_kv_heads"_a,
             "head_dim"_a, "rotary_dim"_a, "block_size"_a)
        .def("paged_attention",
             [](Tape& tape, Address q, Address kv_cache, int kv_dtype, Address table, int64_t, Address, Address, int,
                int num_heads, int num_kv_heads, int head_dim, int block_size, float scale, int window, float softcap,
                Address out) {
                 const int group = group_of(tape, table);
                 tape.add([=](const StepArgs& s) {
                     paged_attention(q, kv_cache, kv_dtype, address(s.block_tables[group]), s.block_table_stride,
                                     address(s.query_start), address(s.seq_lens), s.num_seqs, num_heads, num_kv_heads,
                                     head_dim, block_size, scale, window, softcap, out);
                 });
             },
             "q_ptr"_a, "kv_cache_ptr"_a, "kv_dtype"_a, "block_table_ptr"_a, "block_table_stride"_a,
             "query_start_ptr"_a, "seq_lens_ptr"_a, "num_seqs"_a, "num_heads"_a, "num_kv_heads"_a, "head_dim"_a,
             "block_size"_a, "scale"_a, "window"_a, "softcap"_a, "out_ptr"_a)
        .def("run", &run_tape, "num_tokens"_a, "num_seqs"_a, "input_ids_ptr"_a, "positions_ptr"_a, "slot_mapping_ptrs"_a,
             "block_table_ptrs"_a, "block_table_stride"_a, "query_start_ptr"_a, "seq_lens_ptr"_a, NoGil());
}

}  // namespace

// ---- sampling.h ------------------------------------------------------------------------------------------

namespace {

template <typename T>
using Vector = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Matrix = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

constexpr size_t kSettingsWords = sizeof(aioengine::RowSettings) / sizeof(int32_t);

const aioengine::RowSettings* as_settings(const Matrix<const int32_t>& words, size_t num_rows) {
    if (words.shape(0) != num_rows || words.shape(1) != kSettingsWords) {
        throw nb::value_error("settings must be int32 [rows, 10]");
    }
    return reinterpret_cast<const aioengine::RowSettings*>(words.data());
}

void choose_tokens(uintptr_t logits, int64_t stride, int32_t vocab_size, Vector<const int64_t> rows,
                   Matrix<const int32_t> settings, Matrix<int32_t> out) {
    const size_t num_rows = rows.shape(0);
    const aioengine::RowSettings* row_settings = as_settings(settings, num_rows);
    if (out.shape(0) != 2 || out.shape(1) != num_rows) throw nb::value_error("out must be int32 [2, rows]");
    const auto* x = reinterpret_cast<const float*>(logits);
    nb::gil_scoped_release released;
    aioengine::choose_tokens(x, stride, vocab_size, rows.data(), int(num_rows), row_settings, out.data(),
                             out.data() + num_rows);
}

void score_tokens(uintptr_t logits, int64_t stride, int32_t vocab_size, Vector<const int64_t> rows,
                  Vector<const int64_t> token_ids, Vector<const int64_t> counts, float floor,
                  Vector<float> logprobs, Vector<int32_t> ranks, Vector<int64_t> offsets, Vector<int32_t> top_ids,
                  Vector<float> top_logprobs) {
    const size_t num_rows = rows.shape(0);
    if (token_ids.shape(0) != num_rows || counts.shape(0) != num_rows || logprobs.shape(0) != num_rows ||
        ranks.shape(0) != num_rows || offsets.shape(0) != num_rows) {
        throw nb::value_error("all arrays must have one element per row");
    }
    const auto* x = reinterpret_cast<const float*>(logits);
    nb::gil_scoped_release released;
    aioengine::score_tokens(x, stride, vocab_size, rows.data(), int(num_rows), token_ids.data(), counts.data(), floor,
                            logprobs.data(), ranks.data(), offsets.data(), top_ids.data(), top_logprobs.data());
}

void check_ids(const int32_t* ids, size_t count, int32_t vocab_size) {
    for (size_t i = 0; i < count; ++i) {
        if (ids[i] < 0 || ids[i] >= vocab_size) throw nb::value_error("token id outside the vocabulary");
    }
}

void register_sampling(nb::module_& m) {
    using aioengine::TokenCounts;

    m.def("choose_tokens", &choose_tokens, "logits"_a, "stride"_a, "vocab_size"_a, "rows"_a, "settings"_a, "out"_a);
    m.def("score_tokens", &score_tokens, "logits"_a, "stride"_a, "vocab_size"_a, "rows"_a, "token_ids"_a,
          "counts"_a, "floor"_a, "logprobs"_a, "ranks"_a, "offsets"_a, "top_ids"_a, "top_logprobs"_a);

    nb::class_<TokenCounts>(m, "TokenCounts")
        .def(nb::init<int32_t>(), "vocab_size"_a)
        .def("reset",
             [](TokenCounts& self, Vector<const int32_t> prompt_ids, Vector<const int32_t> output_ids) {
                 check_ids(prompt_ids.data(), prompt_ids.shape(0), self.vocab_size());
                 check_ids(output_ids.data(), output_ids.shape(0), self.vocab_size());
                 self.reset(prompt_ids.data(), prompt_ids.shape(0), output_ids.data(), output_ids.shape(0));
             },
             "prompt_ids"_a, "output_ids"_a)
        .def("add",
             [](TokenCounts& self, int32_t token_id) {
                 check_ids(&token_id, 1, self.vocab_size());
                 self.add(token_id);
             },
             "token_id"_a)
        .def("penalize",
             [](const TokenCounts& self, uintptr_t logits, Matrix<const int32_t> settings) {
                 self.penalize(reinterpret_cast<float*>(logits), *as_settings(settings, 1));
             },
             "logits"_a, "settings"_a);
}

}  // namespace

// ---- completion.h ----------------------------------------------------------------------------------------

namespace {

void register_completion(nb::module_& m) {
    using aioengine::Completion;
    nb::class_<Completion>(m, "Completion")
        .def(nb::init<>())
        .def("fileno", &Completion::fd)
        .def("enqueue", &Completion::enqueue, "stream"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("signal", &Completion::signal)
        .def("take", &Completion::take)
        .def("close", &Completion::close);
    m.def("completion_unavailable", [] {
        const char* reason = aioengine::completion_unavailable();
        return reason == nullptr ? nb::object(nb::none()) : nb::object(nb::str(reason));
    });
}

}  // namespace

NB_MODULE(native, m) {
    m.doc() = "CPU kernels, detokenizer and stream completion";
    register_detokenizer(m);
    register_cpu_kernels(m);
    register_tape(m);
    register_sampling(m);
    register_completion(m);
}
