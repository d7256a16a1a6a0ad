// Weights of a linear layer, kept in their stored precision and repacked once into panels of 16 outputs, the
// order in which the matmul kernels read them. Also the embedding table: rows() dequantizes whole outputs, so
// that a tied embedding and head are stored once. Multiplied by qmatmul; the layouts are read by
// qmatmul_kernels.cpp.
//
// A panel holds 16 outputs (the last one of a segment is padded with zeros), k inputs, in two planes:
//
//   nibble formats   [k/8][16] uint32: input 8i+j of output c is nibble j of word (i, c)
//   byte formats     [k][16] int8
//   float formats    [k][16] float32, float16 or bfloat16
//   scales           [k/group] x { [16] scale, [16] minimum if the format has one }, float16 or float32
//
// A weight is scale * q + minimum. For every GGUF kind scale * q is exact in float32, so that the value is the
// same with and without fused multiply-add, and the same as the format's reference dequantization.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels.h"

namespace aioengine {

struct FormatLayout {
    int bits;         // of one weight in the quants plane
    int group;        // inputs that share a scale; 0 = no scales
    int scale_bytes;  // of one scale
    bool has_min;
    int zero_point;  // subtracted from a stored nibble
};
FormatLayout format_layout(Format format);

// One stored tensor. Immutable once packed; shared by the matrices that contain it.
struct Segment {
    Panels panels;
    std::string kind;  // as stored, e.g. "Q4_1"
    std::shared_ptr<uint8_t> memory;

    size_t num_bytes() const { return size_t(panels.count) * panels.panel_bytes; }
};

class PackedMatrix {
public:
    // data: n rows of k inputs as a GGUF or safetensors file stores them. Throws std::invalid_argument for an
    // unknown kind, sizes that do not fit, or a wrong number of bytes.
    static PackedMatrix pack(const std::string& kind, const uint8_t* data, size_t num_bytes, int64_t n, int64_t k);

    // The outputs of all parts, one after the other; shares their memory. The kinds may differ.
    static PackedMatrix concat(const std::vector<const PackedMatrix*>& parts);

    int n() const { return n_; }
    int k() const { return k_; }
    size_t num_bytes() const;
    std::string kind() const;  // kinds of the segments, joined by "+", each once
    const std::vector<std::shared_ptr<const Segment>>& segments() const { return segments_; }

    // out[i] = the k float32 weights of output ids[i]. Throws std::out_of_range for an id outside [0, n).
    void rows(const int32_t* ids, int count, float* out) const;

private:
    int n_ = 0, k_ = 0;
    std::vector<std::shared_ptr<const Segment>> segments_;
};

}  // namespace aioengine
