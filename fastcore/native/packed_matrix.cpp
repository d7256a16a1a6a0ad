// See packed_matrix.h. The block layouts are those of the GGUF format definition.
#include "packed_matrix.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "threads.h"

#define AIO_ISA portable
#include "simd.h"

namespace aioengine {
namespace {

using portable::bits_from_float;
using portable::f16_from_float;
using portable::float_from_bf16;
using portable::float_from_f16;

uint16_t load_u16(const uint8_t* p) {
    uint16_t value;
    std::memcpy(&value, p, 2);
    return value;
}

float load_half(const uint8_t* p) { return float_from_f16(load_u16(p)); }

// What a block decodes to: integers and, for each group of them, scale and minimum.
struct Block {
    int8_t q[256];
    float scale[16], minimum[16];
};

void unpack_nibbles(const uint8_t* nibbles, int offset, int8_t* q) {
    for (int i = 0; i < 16; ++i) {
        q[i] = int8_t((nibbles[i] & 15) - offset);
        q[i + 16] = int8_t((nibbles[i] >> 4) - offset);
    }
}

void add_fifth_bits(const uint8_t* bits, int8_t* q) {
    uint32_t high;
    std::memcpy(&high, bits, 4);
    for (int i = 0; i < 32; ++i) q[i] = int8_t(q[i] + int8_t(((high >> i) & 1u) << 4));
}

void decode_q4_0(const uint8_t* b, Block& out) {
    out.scale[0] = load_half(b);
    unpack_nibbles(b + 2, 0, out.q);
}

void decode_q4_1(const uint8_t* b, Block& out) {
    out.scale[0] = load_half(b);
    out.minimum[0] = load_half(b + 2);
    unpack_nibbles(b + 4, 0, out.q);
}

void decode_q5_0(const uint8_t* b, Block& out) {
    out.scale[0] = load_half(b);
    unpack_nibbles(b + 6, 16, out.q);
    add_fifth_bits(b + 2, out.q);
}

void decode_q5_1(const uint8_t* b, Block& out) {
    out.scale[0] = load_half(b);
    out.minimum[0] = load_half(b + 2);
    unpack_nibbles(b + 8, 0, out.q);
    add_fifth_bits(b + 4, out.q);
}

void decode_q8_0(const uint8_t* b, Block& out) {
    out.scale[0] = load_half(b);
    std::memcpy(out.q, b + 2, 32);
}

// The eight 6-bit scales and minimums of a 256-weight block, packed into 12 bytes.
void decode_k_scales(const uint8_t* b, Block& out) {
    const float d = load_half(b), dmin = load_half(b + 2);
    const uint8_t* s = b + 4;
    for (int j = 0; j < 4; ++j) {
        out.scale[j] = d * float(s[j] & 63);
        out.minimum[j] = -(dmin * float(s[j + 4] & 63));
        out.scale[j + 4] = d * float((s[j + 8] & 15) | ((s[j] >> 6) << 4));
        out.minimum[j + 4] = -(dmin * float((s[j + 8] >> 4) | ((s[j + 4] >> 6) << 4)));
    }
}

void decode_q4_k(const uint8_t* b, Block& out) {
    decode_k_scales(b, out);
    const uint8_t* nibbles = b + 16;
    for (int pair = 0; pair < 4; ++pair) {
        for (int i = 0; i < 32; ++i) {
            out.q[pair * 64 + i] = int8_t(nibbles[pair * 32 + i] & 15);
            out.q[pair * 64 + 32 + i] = int8_t(nibbles[pair * 32 + i] >> 4);
        }
    }
}

void decode_q5_k(const uint8_t* b, Block& out) {
    decode_k_scales(b, out);
    const uint8_t* high = b + 16;
    const uint8_t* nibbles = b + 48;
    for (int pair = 0; pair < 4; ++pair) {
        for (int i = 0; i < 32; ++i) {
            const int bits = high[i] >> (2 * pair);
            out.q[pair * 64 + i] = int8_t((nibbles[pair * 32 + i] & 15) | ((bits & 1) << 4));
            out.q[pair * 64 + 32 + i] = int8_t((nibbles[pair * 32 + i] >> 4) | ((bits & 2) << 3));
        }
    }
}

void decode_q6_k(const uint8_t* b, Block& out) {
    const float d = load_half(b + 208);
    const int8_t* scales = reinterpret_cast<const int8_t*>(b + 192);
    for (int j = 0; j < 16; ++j) out.scale[j] = d * float(scales[j]);
    for (int half = 0; half < 2; ++half) {
        const uint8_t* low = b + half * 64;
        const uint8_t* high = b + 128 + half * 32;
        int8_t* q = out.q + half * 128;
        for (int i = 0; i < 32; ++i) {
            q[i] = int8_t(((low[i] & 15) | ((high[i] & 3) << 4)) - 32);
            q[i + 32] = int8_t(((low[i + 32] & 15) | (((high[i] >> 2) & 3) << 4)) - 32);
            q[i + 64] = int8_t(((low[i] >> 4) | (((high[i] >> 4) & 3) << 4)) - 32);
            q[i + 96] = int8_t(((low[i + 32] >> 4) | (((high[i] >> 6) & 3) << 4)) - 32);
        }
    }
}

struct Kind {
    const char* name;
    Format format;
    int block_weights, block_bytes;
    void (*decode)(const uint8_t*, Block&);
};

constexpr Kind kKinds[] = {
    {"F32", Format::kFloat32, 1, 4, nullptr},
    {"F16", Format::kFloat16, 1, 2, nullptr},
    {"BF16", Format::kBfloat16, 1, 2, nullptr},
    {"Q4_0", Format::kNibbleHalf, 32, 18, decode_q4_0},
    {"Q4_1", Format::kNibbleHalfMin, 32, 20, decode_q4_1},
    {"Q5_0", Format::kByteHalf, 32, 22, decode_q5_0},
    {"Q5_1", Format::kByteHalfMin, 32, 24, decode_q5_1},
    {"Q8_0", Format::kByteHalf, 32, 34, decode_q8_0},
    {"Q4_K", Format::kNibbleMin, 256, 144, decode_q4_k},
    {"Q5_K", Format::kByteMin, 256, 176, decode_q5_k},
    {"Q6_K", Format::kByte16, 256, 210, decode_q6_k},
};

const Kind& find_kind(const std::string& name) {
    std::string known;
    for (const Kind& kind : kKinds) {
        if (name == kind.name) return kind;
        known += known.empty() ? kind.name : std::string(", ") + kind.name;
    }
    throw std::invalid_argument("kind='" + name + "' cannot be packed; known kinds are " + known);
}

size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

// ---- writing one panel ---------------------------------------------------------------------------------

// One output of a float kind into its lane.
template <class T>
void write_floats(const uint8_t* row, int k, int lane, uint8_t* panel) {
    for (size_t i = 0; i < size_t(k); ++i) {
        std::memcpy(panel + (i * kPanelOutputs + lane) * sizeof(T), row + i * sizeof(T), sizeof(T));
    }
}

void write_group(const FormatLayout& layout, const int8_t* q, float scale, float minimum, int group, int lane,
                 const Panels& panels, uint8_t* panel) {
    const int per_group = layout.group;
    if (layout.bits == 4) {
        for (int word = 0; word < per_group / 8; ++word) {
            uint32_t packed = 0;
            for (int j = 0; j < 8; ++j) packed |= uint32_t(q[word * 8 + j]) << (4 * j);
            const size_t index = size_t(group) * (per_group / 8) + word;
            std::memcpy(panel + (index * 16 + lane) * 4, &packed, 4);
        }
    } else {
        uint8_t* to = panel + size_t(group) * per_group * 16 + lane;
        for (int i = 0; i < per_group; ++i) to[i * 16] = uint8_t(q[i]);
    }
    const int vectors = layout.has_min ? 2 : 1;
    uint8_t* scales = panel + panels.scales_offset + size_t(group) * vectors * 16 * layout.scale_bytes;
    const float values[2] = {scale, minimum};
    for (int v = 0; v < vectors; ++v) {
        if (layout.scale_bytes == 2) {
            const uint16_t half = f16_from_float(values[v]);  // exact: it came from one
            std::memcpy(scales + (v * 16 + lane) * 2, &half, 2);
        } else {
            std::memcpy(scales + (v * 16 + lane) * 4, &values[v], 4);
        }
    }
}

void write_panel(const Kind& kind, const Panels& panels, const uint8_t* rows, int index, uint8_t* panel) {
    const size_t row_bytes = size_t(panels.k / kind.block_weights) * kind.block_bytes;
    const FormatLayout layout = format_layout(panels.format);
    std::memset(panel, 0, panels.panel_bytes);
    Block block;
    for (int lane = 0; lane < kPanelOutputs && index * kPanelOutputs + lane < panels.n; ++lane) {
        const uint8_t* row = rows + (size_t(index) * kPanelOutputs + lane) * row_bytes;
        if (kind.decode == nullptr) {
            if (kind.block_bytes == 4) {
                write_floats<uint32_t>(row, panels.k, lane, panel);
            } else {
                write_floats<uint16_t>(row, panels.k, lane, panel);
            }
            continue;
        }
        const int groups = kind.block_weights / layout.group;
        for (int b = 0; b < panels.k / kind.block_weights; ++b) {
            kind.decode(row + size_t(b) * kind.block_bytes, block);
            for (int g = 0; g < groups; ++g) {
                write_group(layout, block.q + g * layout.group, block.scale[g], block.minimum[g], b * groups + g,
                            lane, panels, panel);
            }
        }
    }
}

// ---- reading one output --------------------------------------------------------------------------------

float read_scale(const FormatLayout& layout, const uint8_t* scales, size_t index) {
    if (layout.scale_bytes == 2) return load_half(scales + index * 2);
    float value;
    std::memcpy(&value, scales + index * 4, 4);
    return value;
}

void read_floats(const Panels& panels, const uint8_t* panel, int lane, float* out) {
    for (int i = 0; i < panels.k; ++i) {
        const size_t at = size_t(i) * 16 + lane;
        if (panels.format == Format::kFloat32) {
            std::memcpy(&out[i], panel + at * 4, 4);
        } else {
            const uint16_t half = load_u16(panel + at * 2);
            out[i] = panels.format == Format::kFloat16 ? float_from_f16(half) : float_from_bf16(half);
        }
    }
}

void read_row(const Panels& panels, int output, float* out) {
    const FormatLayout layout = format_layout(panels.format);
    const uint8_t* panel = panels.data + size_t(output / kPanelOutputs) * panels.panel_bytes;
    const int lane = output % kPanelOutputs;
    if (layout.group == 0) return read_floats(panels, panel, lane, out);
    const int vectors = layout.has_min ? 2 : 1;
    for (int g = 0; g < panels.k / layout.group; ++g) {
        const size_t at = size_t(g) * vectors * 16 + lane;
        const float scale = read_scale(layout, panel + panels.scales_offset, at);
        const float minimum = layout.has_min ? read_scale(layout, panel + panels.scales_offset, at + 16) : 0.0f;
        for (int i = g * layout.group; i < (g + 1) * layout.group; ++i) {
            int q;
            if (layout.bits == 4) {
                uint32_t word;
                std::memcpy(&word, panel + (size_t(i / 8) * 16 + lane) * 4, 4);
                q = int((word >> (4 * (i % 8))) & 15u) - layout.zero_point;
            } else {
                q = int8_t(panel[size_t(i) * 16 + lane]);
            }
            out[i] = scale * float(q) + minimum;
        }
    }
}

}  // namespace

FormatLayout format_layout(Format format) {
    switch (format) {
        case Format::kFloat32: return {32, 0, 0, false, 0};
        case Format::kFloat16: return {16, 0, 0, false, 0};
        case Format::kBfloat16: return {16, 0, 0, false, 0};
        case Format::kNibbleHalf: return {4, 32, 2, false, 8};
        case Format::kNibbleHalfMin: return {4, 32, 2, true, 0};
        case Format::kNibbleMin: return {4, 32, 4, true, 0};
        case Format::kByteHalf: return {8, 32, 2, false, 0};
        case Format::kByteHalfMin: return {8, 32, 2, true, 0};
        case Format::kByteMin: return {8, 32, 4, true, 0};
        case Format::kByte16: return {8, 16, 4, false, 0};
    }
    throw std::logic_error("unknown format");
}

PackedMatrix PackedMatrix::pack(const std::string& kind_name, const uint8_t* data, size_t num_bytes, int64_t n,
                                int64_t k) {
    const Kind& kind = find_kind(kind_name);
    const std::string shape = "n=" + std::to_string(n) + ", k=" + std::to_string(k);
    if (n <= 0 || k <= 0 || n > INT32_MAX / 2 || k > INT32_MAX / 2) {
        throw std::invalid_argument(shape + " is not a valid matrix shape; both must be positive 31-bit numbers");
    }
    if (k % kind.block_weights != 0) {
        throw std::invalid_argument(shape + " does not fit " + kind_name + ": k must be a multiple of " +
                                    std::to_string(kind.block_weights));
    }
    const size_t expected = size_t(n) * size_t(k / kind.block_weights) * kind.block_bytes;
    if (num_bytes != expected) {
        throw std::invalid_argument(kind_name + " weights of " + shape + " take " + std::to_string(expected) +
                                    " bytes, but " + std::to_string(num_bytes) + " were given");
    }

    auto segment = std::make_shared<Segment>();
    segment->kind = kind_name;
    Panels& panels = segment->panels;
    panels.format = kind.format;
    panels.n = int(n);
    panels.k = int(k);
    panels.count = int((n + kPanelOutputs - 1) / kPanelOutputs);
    const FormatLayout layout = format_layout(kind.format);
    panels.scales_offset = round_up(size_t(k) * kPanelOutputs * layout.bits / 8, 64);
    const size_t scales = layout.group == 0 ? 0 : size_t(k / layout.group) * (layout.has_min ? 2 : 1) * 16;
    panels.panel_bytes = panels.scales_offset + round_up(scales * layout.scale_bytes, 64);
    uint8_t* memory = static_cast<uint8_t*>(std::aligned_alloc(64, segment->num_bytes()));
    if (memory == nullptr) throw std::bad_alloc();
    segment->memory = std::shared_ptr<uint8_t>(memory, std::free);
    panels.data = memory;
    const int chunks = std::min(panels.count, 64);
    parallel_for(chunks, [&](int chunk) {
        const Range part = split_range(panels.count, chunks, chunk);
        for (int p = part.begin; p < part.end; ++p) {
            write_panel(kind, panels, data, p, memory + size_t(p) * panels.panel_bytes);
        }
    });

    PackedMatrix matrix;
    matrix.n_ = panels.n;
    matrix.k_ = panels.k;
    matrix.segments_.push_back(std::move(segment));
    return matrix;
}

PackedMatrix PackedMatrix::concat(const std::vector<const PackedMatrix*>& parts) {
    if (parts.empty()) throw std::invalid_argument("concat needs at least one matrix");
    PackedMatrix matrix;
    matrix.k_ = parts[0]->k_;
    int64_t n = 0;
    for (const PackedMatrix* part : parts) {
        if (part->k_ != matrix.k_) {
            throw std::invalid_argument("concat stacks outputs, so all parts need the same k, but got k=" +
                                        std::to_string(matrix.k_) + " and k=" + std::to_string(part->k_));
        }
        n += part->n_;
        matrix.segments_.insert(matrix.segments_.end(), part->segments_.begin(), part->segments_.end());
    }
    if (n > INT32_MAX / 2) throw std::invalid_argument("concat: too many outputs: " + std::to_string(n));
    matrix.n_ = int(n);
    return matrix;
}

size_t PackedMatrix::num_bytes() const {
    size_t total = 0;
    for (const auto& segment : segments_) total += segment->num_bytes();
    return total;
}

std::string PackedMatrix::kind() const {
    std::string names;
    std::vector<std::string> seen;
    for (const auto& segment : segments_) {
        if (std::find(seen.begin(), seen.end(), segment->kind) != seen.end()) continue;
        seen.push_back(segment->kind);
        names += names.empty() ? segment->kind : "+" + segment->kind;
    }
    return names;
}

void PackedMatrix::rows(const int32_t* ids, int count, float* out) const {
    for (int i = 0; i < count; ++i) {
        if (ids[i] < 0 || ids[i] >= n_) {
            throw std::out_of_range("row " + std::to_string(ids[i]) + " is outside [0, " + std::to_string(n_) + ")");
        }
    }
    constexpr int kRowsPerChunk = 8;
    parallel_for((count + kRowsPerChunk - 1) / kRowsPerChunk, [&](int chunk) {
        for (int i = chunk * kRowsPerChunk; i < count && i < (chunk + 1) * kRowsPerChunk; ++i) {
            int output = ids[i];
            size_t s = 0;
            while (output >= segments_[s]->panels.n) output -= segments_[s++]->panels.n;
            read_row(segments_[s]->panels, output, out + size_t(i) * k_);
        }
    });
}

}  // namespace aioengine
