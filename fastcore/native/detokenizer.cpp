#include "detokenizer.h"

namespace aioengine {

namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

}  // namespace

void Vocabulary::append(std::string_view bytes, uint8_t flags) {
    arena_.append(bytes);
    ends_.push_back(arena_.size());
    flags_.push_back(flags);
}

std::string_view Vocabulary::bytes(int64_t id) const {
    if (id < 0 || size_t(id) >= ends_.size()) return {};
    const size_t begin = id == 0 ? 0 : ends_[size_t(id) - 1];
    return {arena_.data() + begin, ends_[size_t(id)] - begin};
}

uint8_t Vocabulary::flags(int64_t id) const {
    return id < 0 || size_t(id) >= flags_.size() ? 0 : flags_[size_t(id)];
}

void Utf8Assembler::feed(std::string_view bytes, std::string& out) {
    for (const char c : bytes) {
        const auto byte = static_cast<unsigned char>(c);
        if (missing_ != 0) {
            if (byte >= low_ && byte <= high_) {
                held_[num_held_++] = c;
                low_ = 0x80;
                high_ = 0xBF;
                if (--missing_ == 0) {
                    out.append(held_.data(), num_held_);
                    num_held_ = 0;
                }
                continue;
            }
            finish(out);  // the character broke off; this byte starts anew
        }
        if (byte < 0x80) {
            out.push_back(c);
            continue;
        }
        // Lead bytes and the ranges of the byte that follows them: no overlong forms, no surrogates,
        // nothing above U+10FFFF (Unicode, table 3-7).
        if (byte >= 0xC2 && byte <= 0xDF) {
            missing_ = 1;
        } else if (byte >= 0xE0 && byte <= 0xEF) {
            missing_ = 2;
            if (byte == 0xE0) low_ = 0xA0;
            if (byte == 0xED) high_ = 0x9F;
        } else if (byte >= 0xF0 && byte <= 0xF4) {
            missing_ = 3;
            if (byte == 0xF0) low_ = 0x90;
            if (byte == 0xF4) high_ = 0x8F;
        } else {
            out.append(kReplacement);
            continue;
        }
        held_[0] = c;
        num_held_ = 1;
    }
}

void Utf8Assembler::finish(std::string& out) {
    if (missing_ == 0) return;
    out.append(kReplacement);
    missing_ = num_held_ = 0;
    low_ = 0x80;
    high_ = 0xBF;
}

StopSet::StopSet(const std::vector<std::string>& stops) {
    nodes_.emplace_back();
    for (size_t i = 0; i < stops.size(); ++i) {
        lengths_.push_back(stops[i].size());
        int32_t at = 0;
        for (const char c : stops[i]) {
            const auto byte = static_cast<unsigned char>(c);
            int32_t down = child(at, byte);
            if (down == 0) {
                down = int32_t(nodes_.size());
                Node node;
                node.label = byte;
                node.depth = nodes_[size_t(at)].depth + 1;
                node.sibling = nodes_[size_t(at)].first_child;
                nodes_.push_back(node);
                nodes_[size_t(at)].first_child = down;
                if (at == 0) root_[byte] = down;
            }
            at = down;
        }
        if (at != 0 && nodes_[size_t(at)].stop < 0) nodes_[size_t(at)].stop = int32_t(i);
    }
    // Breadth first, so that the shorter node a link leads to is complete before it is used.
    std::vector<int32_t> order{0};
    for (size_t i = 0; i < order.size(); ++i) {
        const int32_t at = order[i];
        for (int32_t down = nodes_[size_t(at)].first_child; down != 0; down = nodes_[size_t(down)].sibling) {
            Node& node = nodes_[size_t(down)];
            node.fail = at == 0 ? 0 : next(nodes_[size_t(at)].fail, node.label);
            const Node& shorter = nodes_[size_t(node.fail)];
            if (node.stop < 0) node.stop = shorter.stop;
            node.held = node.first_child != 0 ? node.depth : shorter.held;
            order.push_back(down);
        }
    }
}

int32_t StopSet::child(int32_t node, unsigned char byte) const {
    if (node == 0) return root_[byte];
    int32_t down = nodes_[size_t(node)].first_child;
    while (down != 0 && nodes_[size_t(down)].label != byte) down = nodes_[size_t(down)].sibling;
    return down;
}

int32_t StopSet::next(int32_t state, unsigned char byte) const {
    for (;;) {
        const int32_t down = child(state, byte);
        if (down != 0 || state == 0) return down;
        state = nodes_[size_t(state)].fail;
    }
}

TextStream::TextStream(std::shared_ptr<const Vocabulary> vocabulary, std::shared_ptr<const StopSet> stops,
                       TextOptions options)
    : vocabulary_(std::move(vocabulary)),
      stops_(std::move(stops)),
      options_(options),
      strip_pending_(options.strip_first_space && vocabulary_ != nullptr && vocabulary_->strip_first_space()) {}

bool TextStream::push(int64_t token_id) {
    if (stop_ >= 0 || vocabulary_ == nullptr) return stop_ >= 0;
    ++num_tokens_;
    const uint8_t flags = vocabulary_->flags(token_id);
    if (!(options_.skip_special_tokens && (flags & Vocabulary::kSpecial) != 0)) {
        std::string_view bytes = vocabulary_->bytes(token_id);
        const bool is_added = (flags & Vocabulary::kAdded) != 0;
        if (is_added && after_added_ && !options_.spaces_between_special_tokens &&
            !options_.skip_special_tokens) {
            while (!bytes.empty() && bytes.front() == ' ') bytes.remove_prefix(1);
        }
        after_added_ = is_added;
        if (strip_pending_ && !bytes.empty()) {
            if (bytes.front() == ' ') bytes.remove_prefix(1);
            strip_pending_ = false;
        }
        assembler_.feed(bytes, text_);
    }
    return scan();
}

bool TextStream::push_text(std::string_view valid_utf8) {
    if (stop_ >= 0) return true;
    ++num_tokens_;
    text_.append(valid_utf8);
    return scan();
}

// INV-62, INV-63: the matcher sees every byte once. A stop text that is complete within the first
// min_tokens tokens is passed over; one that began there and ends later is found.
bool TextStream::scan() {
    if (stops_ == nullptr) {
        ready_ = scanned_ = text_.size();
        return false;
    }
    const bool may_stop = num_tokens_ > options_.min_tokens;
    while (scanned_ < text_.size()) {
        state_ = stops_->next(state_, static_cast<unsigned char>(text_[scanned_++]));
        const int32_t stop = stops_->match(state_);
        if (stop < 0 || !may_stop) continue;
        stop_ = stop;
        text_.resize(options_.include_stop ? scanned_ : scanned_ - stops_->length(stop));
        ready_ = text_.size();
        return true;
    }
    ready_ = text_.size() - (options_.include_stop ? 0 : stops_->held(state_));
    return false;
}

void TextStream::finish(std::string_view tail) {
    if (stop_ >= 0) return;
    assembler_.finish(text_);
    text_.append(tail);
    ready_ = scanned_ = text_.size();
}

std::string_view TextStream::take() {
    const std::string_view fresh{text_.data() + taken_, ready_ - taken_};
    taken_ = ready_;
    return fresh;
}

}  // namespace aioengine
