// Vectors of float32 for one instruction-set level, and the few functions on them that the kernels need.
// Included only by the *_kernels.cpp files, which are compiled once per level with -DAIO_ISA=name: everything
// here lies in that level's namespace, and those files use no inline function of the standard library, so
// that the linker can never hand code made for one level to another.
//
// The result of every function is the same on all levels that have fused multiply-add. Contraction by the
// compiler is off: where two operations are fused, the source says vfma.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define AIO_INLINE static inline __attribute__((always_inline))
#define AIO_MEMBER inline __attribute__((always_inline))

namespace aioengine {
namespace AIO_ISA {

constexpr int kPanel = 16;  // outputs of one weight panel, keys of one score panel

// ---- half precision, one value at a time ---------------------------------------------------------------

AIO_INLINE float float_from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

AIO_INLINE uint32_t bits_from_float(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

AIO_INLINE float float_from_bf16(uint16_t half) { return float_from_bits(uint32_t(half) << 16); }

AIO_INLINE uint16_t bf16_from_float(float value) {  // to nearest, ties to even
    const uint32_t bits = bits_from_float(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits >> 16) | 0x40u);
    return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

#if defined(__F16C__)
AIO_INLINE float float_from_f16(uint16_t half) { return _cvtsh_ss(half); }
AIO_INLINE uint16_t f16_from_float(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }
#else
AIO_INLINE float float_from_f16(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000u) << 16;
    const uint32_t magnitude = half & 0x7fffu;
    if (magnitude >= 0x7c00u) return float_from_bits(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
    if (magnitude >= 0x400u) return float_from_bits(sign | ((magnitude << 13) + (112u << 23)));
    const float subnormal = float(magnitude) * 5.9604644775390625e-8f;  // 2^-24
    return float_from_bits(sign | bits_from_float(subnormal));
}

AIO_INLINE uint16_t f16_from_float(float value) {
    const uint32_t bits = bits_from_float(value);
    const uint16_t sign = uint16_t((bits >> 16) & 0x8000u);
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return uint16_t(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00u);  // rounds to infinity
    if (magnitude < 0x38800000u) {  // subnormal: adding 2^-1 leaves the rounded value in the low bits
        const float shifted = float_from_bits(magnitude) + 0.5f;
        return uint16_t(sign | (bits_from_float(shifted) - 0x3f000000u));
    }
    return uint16_t(sign | ((magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13));
}
#endif

// ---- vectors -------------------------------------------------------------------------------------------

#if defined(__AVX512F__)

constexpr int kWidth = 16;
using VF = __m512;
using VI = __m512i;

AIO_INLINE VF vset1(float x) { return _mm512_set1_ps(x); }
AIO_INLINE VF vload(const float* p) { return _mm512_loadu_ps(p); }
AIO_INLINE void vstore(float* p, VF x) { _mm512_storeu_ps(p, x); }
AIO_INLINE VF vload_some(const float* p, int count) {
    return _mm512_maskz_loadu_ps(__mmask16((1u << count) - 1u), p);
}
AIO_INLINE void vstore_some(float* p, VF x, int count) {
    _mm512_mask_storeu_ps(p, __mmask16((1u << count) - 1u), x);
}
AIO_INLINE VF vfma(VF a, VF b, VF c) { return _mm512_fmadd_ps(a, b, c); }
AIO_INLINE VF vmax(VF a, VF b) { return _mm512_max_ps(a, b); }  // b where either is NaN
AIO_INLINE VF vmin(VF a, VF b) { return _mm512_min_ps(a, b); }
AIO_INLINE VF vsqrt(VF a) { return _mm512_sqrt_ps(a); }
AIO_INLINE VF vselect_less(VF a, VF b, VF yes, VF no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}
AIO_INLINE VF vabs(VF a) { return _mm512_abs_ps(a); }
AIO_INLINE VI vload_int(const void* p) { return _mm512_loadu_si512(p); }
template <int N> AIO_INLINE VI vshift_right(VI a) { return _mm512_srli_epi32(a, N); }
AIO_INLINE VI vadd_int(VI a, VI b) { return _mm512_add_epi32(a, b); }
AIO_INLINE VI vset1_int(int x) { return _mm512_set1_epi32(x); }
template <int N> AIO_INLINE VI vshift_left(VI a) { return _mm512_slli_epi32(a, N); }
AIO_INLINE VF vfloat(VI a) { return _mm512_cvtepi32_ps(a); }
AIO_INLINE VI vround_int(VF a) { return _mm512_cvtps_epi32(a); }
AIO_INLINE VF vbits(VI a) { return _mm512_castsi512_ps(a); }
AIO_INLINE VF vload_i8(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
AIO_INLINE VF vload_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
AIO_INLINE VF vload_bf16(const uint16_t* p) {
    const VI wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return vbits(_mm512_slli_epi32(wide, 16));
}
AIO_INLINE float vsum(VF a) {
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
AIO_INLINE float vmax_lanes(VF a) {
    const __m256 half = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

#elif defined(__AVX2__)

constexpr int kWidth = 8;
using VF = __m256;
using VI = __m256i;

AIO_INLINE VF vset1(float x) { return _mm256_set1_ps(x); }
AIO_INLINE VF vload(const float* p) { return _mm256_loadu_ps(p); }
AIO_INLINE void vstore(float* p, VF x) { _mm256_storeu_ps(p, x); }
AIO_INLINE VI vfirst_lanes(int count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
AIO_INLINE VF vload_some(const float* p, int count) { return _mm256_maskload_ps(p, vfirst_lanes(count)); }
AIO_INLINE void vstore_some(float* p, VF x, int count) { _mm256_maskstore_ps(p, vfirst_lanes(count), x); }
AIO_INLINE VF vfma(VF a, VF b, VF c) { return _mm256_fmadd_ps(a, b, c); }
AIO_INLINE VF vmax(VF a, VF b) { return _mm256_max_ps(a, b); }  // b where either is NaN
AIO_INLINE VF vmin(VF a, VF b) { return _mm256_min_ps(a, b); }
AIO_INLINE VF vsqrt(VF a) { return _mm256_sqrt_ps(a); }
AIO_INLINE VF vselect_less(VF a, VF b, VF yes, VF no) {
    return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
AIO_INLINE VF vabs(VF a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
AIO_INLINE VI vload_int(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
template <int N> AIO_INLINE VI vshift_right(VI a) { return _mm256_srli_epi32(a, N); }
AIO_INLINE VI vadd_int(VI a, VI b) { return _mm256_add_epi32(a, b); }
AIO_INLINE VI vset1_int(int x) { return _mm256_set1_epi32(x); }
template <int N> AIO_INLINE VI vshift_left(VI a) { return _mm256_slli_epi32(a, N); }
AIO_INLINE VF vfloat(VI a) { return _mm256_cvtepi32_ps(a); }
AIO_INLINE VI vround_int(VF a) { return _mm256_cvtps_epi32(a); }
AIO_INLINE VF vbits(VI a) { return _mm256_castsi256_ps(a); }
AIO_INLINE VF vload_i8(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
AIO_INLINE VF vload_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
AIO_INLINE VF vload_bf16(const uint16_t* p) {
    const VI wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    return vbits(_mm256_slli_epi32(wide, 16));
}
AIO_INLINE float vsum(VF a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
AIO_INLINE float vmax_lanes(VF a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

#else  // any processor: vector extensions of GCC and Clang, four lanes

constexpr int kWidth = 4;
typedef float VF __attribute__((vector_size(16)));
typedef int32_t VI __attribute__((vector_size(16)));
typedef uint32_t VU __attribute__((vector_size(16)));

AIO_INLINE VF vset1(float x) { return VF{x, x, x, x}; }
AIO_INLINE VF vload(const float* p) {
    VF x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
AIO_INLINE void vstore(float* p, VF x) { std::memcpy(p, &x, sizeof x); }
AIO_INLINE VF vload_some(const float* p, int count) {
    VF x = VF{0, 0, 0, 0};
    for (int i = 0; i < count; ++i) x[i] = p[i];
    return x;
}
AIO_INLINE void vstore_some(float* p, VF x, int count) {
    for (int i = 0; i < count; ++i) p[i] = x[i];
}
#if defined(__ARM_NEON)
AIO_INLINE VF vfma(VF a, VF b, VF c) { return (VF)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
#else
AIO_INLINE VF vfma(VF a, VF b, VF c) { return a * b + c; }
#endif
AIO_INLINE VF vmax(VF a, VF b) { return a > b ? a : b; }  // b where either is NaN
AIO_INLINE VF vmin(VF a, VF b) { return a < b ? a : b; }
AIO_INLINE VF vsqrt(VF a) {
    return VF{__builtin_sqrtf(a[0]), __builtin_sqrtf(a[1]), __builtin_sqrtf(a[2]), __builtin_sqrtf(a[3])};
}
AIO_INLINE VF vselect_less(VF a, VF b, VF yes, VF no) { return a < b ? yes : no; }
AIO_INLINE VF vabs(VF a) { return (VF)((VI)a & 0x7fffffff); }
AIO_INLINE VI vload_int(const void* p) {
    VI x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
template <int N> AIO_INLINE VI vshift_right(VI a) { return (VI)((VU)a >> N); }
AIO_INLINE VI vadd_int(VI a, VI b) { return a + b; }
AIO_INLINE VI vset1_int(int x) { return VI{x, x, x, x}; }
template <int N> AIO_INLINE VI vshift_left(VI a) { return (VI)((VU)a << N); }
AIO_INLINE VF vfloat(VI a) { return __builtin_convertvector(a, VF); }
AIO_INLINE VI vround_int(VF a) {  // to nearest even for |a| < 2^22, as all callers guarantee
    const VF magic = vset1(12582912.0f);
    return __builtin_convertvector((a + magic) - magic, VI);
}
AIO_INLINE VF vbits(VI a) { return (VF)a; }
AIO_INLINE VF vload_i8(const int8_t* p) { return VF{float(p[0]), float(p[1]), float(p[2]), float(p[3])}; }
AIO_INLINE VF vload_f16(const uint16_t* p) {
    return VF{float_from_f16(p[0]), float_from_f16(p[1]), float_from_f16(p[2]), float_from_f16(p[3])};
}
AIO_INLINE VF vload_bf16(const uint16_t* p) {
    return VF{float_from_bf16(p[0]), float_from_bf16(p[1]), float_from_bf16(p[2]), float_from_bf16(p[3])};
}
AIO_INLINE float vsum(VF a) { return (a[0] + a[2]) + (a[1] + a[3]); }
AIO_INLINE float vmax_lanes(VF a) {
    const float x = a[0] > a[2] ? a[0] : a[2], y = a[1] > a[3] ? a[1] : a[3];
    return x > y ? x : y;
}

#endif

constexpr int kPanelVecs = kPanel / kWidth;

AIO_INLINE VF vzero() { return vset1(0.0f); }

// ---- square transposition: row r, lane c  <->  row c, lane r -------------------------------------------

#if defined(__AVX512F__)
AIO_INLINE void transpose(VF (&r)[16]) {
    VF a[16], b[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        a[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        a[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        for (int j = 0; j < 2; ++j) {
            const VF x = a[4 * i + j], y = a[4 * i + 2 + j];
            b[4 * i + 2 * j] = _mm512_shuffle_ps(x, y, 0x44);
            b[4 * i + 2 * j + 1] = _mm512_shuffle_ps(x, y, 0xee);
        }
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
        const VF lo_even = _mm512_shuffle_f32x4(b[c], b[4 + c], 0x88);
        const VF lo_odd = _mm512_shuffle_f32x4(b[c], b[4 + c], 0xdd);
        const VF hi_even = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0x88);
        const VF hi_odd = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0xdd);
        r[c] = _mm512_shuffle_f32x4(lo_even, hi_even, 0x88);
        r[4 + c] = _mm512_shuffle_f32x4(lo_odd, hi_odd, 0x88);
        r[8 + c] = _mm512_shuffle_f32x4(lo_even, hi_even, 0xdd);
        r[12 + c] = _mm512_shuffle_f32x4(lo_odd, hi_odd, 0xdd);
    }
}
#elif defined(__AVX2__)
AIO_INLINE void transpose(VF (&r)[8]) {
    VF a[8], b[8];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        a[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        a[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
        for (int j = 0; j < 2; ++j) {
            const VF x = a[4 * i + j], y = a[4 * i + 2 + j];
            b[4 * i + 2 * j] = _mm256_shuffle_ps(x, y, 0x44);
            b[4 * i + 2 * j + 1] = _mm256_shuffle_ps(x, y, 0xee);
        }
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
        r[c] = _mm256_permute2f128_ps(b[c], b[4 + c], 0x20);
        r[4 + c] = _mm256_permute2f128_ps(b[c], b[4 + c], 0x31);
    }
}
#else
AIO_INLINE void transpose(VF (&r)[4]) {
    VF t[4];
    for (int i = 0; i < 4; ++i) t[i] = VF{r[0][i], r[1][i], r[2][i], r[3][i]};
    for (int i = 0; i < 4; ++i) r[i] = t[i];
}
#endif

// ---- exponential functions -----------------------------------------------------------------------------

// exp(x) within 2 ulp; exact 1 at 0; 0 below e^-86.6; infinity from e^88.73 on; NaN stays NaN.
AIO_INLINE VF vexp(VF x) {
    const VF lowest = vset1(-86.6f);
    const VF clamped = vmin(vset1(89.5f), vmax(lowest, x));
    const VI n = vround_int(clamped * vset1(1.44269504089f));
    const VF nf = vfloat(n);
    VF r = vfma(nf, vset1(-0.693359375f), clamped);
    r = vfma(nf, vset1(2.12194440e-4f), r);
    VF p = vset1(1.381431999e-3f);
    p = vfma(p, r, vset1(8.368851312e-3f));
    p = vfma(p, r, vset1(4.166840111e-2f));
    p = vfma(p, r, vset1(1.666651952e-1f));
    p = vfma(p, r, vset1(4.999999337e-1f));
    p = vfma(p, r * r, r) + vset1(1.0f);
    // 2^n as 2 * 2^(n-1), so that n = 128 does not overflow early.
    const VF power = vbits(vshift_left<23>(vadd_int(n, vset1_int(126))));
    return vselect_less(x, lowest, vzero(), (p + p) * power);
}

AIO_INLINE VF vtanh(VF x) {
    const VF magnitude = vabs(x);
    const VF z = x * x;
    VF p = vset1(2.059536681e-3f);
    p = vfma(p, z, vset1(-8.085576538e-3f));
    p = vfma(p, z, vset1(2.166338228e-2f));
    p = vfma(p, z, vset1(-5.393993865e-2f));
    p = vfma(p, z, vset1(1.333315215e-1f));
    p = vfma(p, z, vset1(-3.333332944e-1f));
    const VF near_zero = vfma(p * z, x, x);
    const VF away = vset1(1.0f) - vset1(2.0f) / (vexp(magnitude + magnitude) + vset1(1.0f));
    const VF signed_away = vselect_less(x, vzero(), vzero() - away, away);
    return vselect_less(magnitude, vset1(0.625f), near_zero, signed_away);
}

}  // namespace AIO_ISA
}  // namespace aioengine
