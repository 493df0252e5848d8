// CUDA's types, built-in variables and intrinsics, as far as the kernels use them.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#define FORETELL_EMULATED
// The C library has a function `index`.
#define index foretell_index
#define __device__
#define __forceinline__ inline
// The kernels' shared variables are the only thread-local ones, so they are one range of memory,
// which `shared_variables()` finds. Each block gets its own contents.
#define __shared__ static thread_local
#define KERNEL(name)                                                                                                              \
    static void name(const Arguments arguments);                                                                                  \
    static const bool is_registered_##name = register_kernel(#name, name);                                                        \
    static void name(const Arguments arguments)
#define TENSOR_KERNEL(name) KERNEL(name)

using std::isfinite;

struct dim3 {
    unsigned x, y, z;
};
static dim3 threadIdx, blockIdx, blockDim, gridDim;

static inline unsigned __float_as_uint(float x) {
    unsigned bits;
    memcpy(&bits, &x, 4);
    return bits;
}
static inline float __uint_as_float(unsigned bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
static inline float emulated_half_to_single(unsigned short bits) {
    _Float16 half;
    memcpy(&half, &bits, 2);
    return (float)half;
}
static inline unsigned short emulated_single_to_half(float x) {
    _Float16 half = (_Float16)x;
    unsigned short bits;
    memcpy(&bits, &half, 2);
    return bits;
}
static inline int __popc(unsigned x) { return __builtin_popcount(x); }

// Threads switch at barriers only, so these need no atomic instructions.
static inline int atomicCAS(int *address, int compare, int value) {
    int old = *address;
    if (old == compare) {
        *address = value;
    }
    return old;
}
static inline int atomicExch(int *address, int value) {
    int old = *address;
    *address = value;
    return old;
}
static inline void __threadfence() {}
