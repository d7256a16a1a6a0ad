// Text out of token ids, piece by piece: a vocabulary of byte strings, a UTF-8 assembler that holds back an
// unfinished character, and a matcher of stop texts that holds back what may still become one.
// Knows no Python. Used through bindings.cpp by aioengine/tokenizer.py; one TextStream per choice, touched
// by one thread at a time; Vocabulary and StopSet are immutable and shared.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace aioengine {

// The bytes that each token id stands for.
class Vocabulary {
public:
    static constexpr uint8_t kSpecial = 1;  // left out of the text if special tokens are skipped
    static constexpr uint8_t kAdded = 2;    // an added token, special or not

    // strip_first_space: a whole text loses one leading space (SentencePiece models put one in front).
    explicit Vocabulary(bool strip_first_space) : strip_first_space_(strip_first_space) {}

    void append(std::string_view bytes, uint8_t flags);

    size_t size() const { return flags_.size(); }
    bool strip_first_space() const { return strip_first_space_; }
    // Ids outside of the vocabulary (padding rows of the output layer) have no bytes and no flags.
    std::string_view bytes(int64_t id) const;
    uint8_t flags(int64_t id) const;

private:
    std::string arena_;
    std::vector<size_t> ends_;
    std::vector<uint8_t> flags_;
    bool strip_first_space_;
};

// Turns bytes into valid UTF-8 as they come. Each maximal part of an invalid sequence becomes one U+FFFD,
// as in Python's bytes.decode(errors="replace").
class Utf8Assembler {
public:
    void feed(std::string_view bytes, std::string& out);
    // The bytes of an unfinished character become one U+FFFD.
    void finish(std::string& out);

private:
    std::array<char, 4> held_{};
    uint8_t num_held_ = 0;
    uint8_t missing_ = 0;               // continuation bytes still to come
    uint8_t low_ = 0x80, high_ = 0xBF;  // range of the next one
};

// Aho-Corasick automaton over the bytes of the stop texts. A state is the longest end of the text that
// begins a stop text.
class StopSet {
public:
    explicit StopSet(const std::vector<std::string>& stops);

    int32_t next(int32_t state, unsigned char byte) const;
    // Index of the longest stop text that ends here, or -1.
    int32_t match(int32_t state) const { return nodes_[size_t(state)].stop; }
    // Number of last bytes that may still become the beginning of a stop text.
    size_t held(int32_t state) const { return nodes_[size_t(state)].held; }
    size_t length(int32_t stop) const { return lengths_[size_t(stop)]; }

private:
    struct Node {
        int32_t first_child = 0, sibling = 0, fail = 0, stop = -1;
        uint32_t depth = 0, held = 0;
        unsigned char label = 0;
    };
    int32_t child(int32_t node, unsigned char byte) const;

    std::vector<Node> nodes_;
    std::array<int32_t, 256> root_{};
    std::vector<size_t> lengths_;
};

struct TextOptions {
    bool skip_special_tokens = true;
    bool spaces_between_special_tokens = true;  // false: an added token after another loses leading spaces
    bool include_stop = false;
    bool strip_first_space = false;  // the text stands alone, not after a prompt
    int64_t min_tokens = 0;
};

// The text of one choice. Text up to `ready()` bytes is final: no later token changes it.
class TextStream {
public:
    // Either may be null: without a vocabulary only push_text works.
    TextStream(std::shared_ptr<const Vocabulary> vocabulary, std::shared_ptr<const StopSet> stops,
               TextOptions options);

    // Appends a token. True if a stop text is now complete; the text then ends before it (or after it, if
    // included) and everything later is ignored.
    bool push(int64_t token_id);
    // The same for a token whose text was decoded elsewhere.
    bool push_text(std::string_view valid_utf8);
    // Nothing will follow: what was held back becomes final, and so does `tail`, text decoded elsewhere. Stop
    // texts are not looked for in what is added here (U+FFFD for a broken end).
    void finish(std::string_view tail = {});

    std::string_view text() const { return {text_.data(), ready_}; }
    size_t ready() const { return ready_; }
    // Final text that was not taken before.
    std::string_view take();
    size_t taken() const { return taken_; }
    int32_t stop() const { return stop_; }
    int64_t num_tokens() const { return num_tokens_; }

private:
    bool scan();

    std::shared_ptr<const Vocabulary> vocabulary_;
    std::shared_ptr<const StopSet> stops_;
    TextOptions options_;
    Utf8Assembler assembler_;
    std::string text_;     // complete characters only
    size_t scanned_ = 0;   // bytes of text_ that the matcher has seen
    size_t ready_ = 0;
    size_t taken_ = 0;
    int64_t num_tokens_ = 0;
    int32_t state_ = 0;
    int32_t stop_ = -1;
    bool after_added_ = false;
    bool strip_pending_;
};

}  // namespace aioengine
