// What all kernels share: the format of numbers, the one structure of arguments, sums over a block, and the report of an index that is out
// of range. Compiled before each file, once for each precision: PRECISION is 0 for fp32, 1 for bf16, 2 for fp16. No header of CUDA is
// needed, so NVRTC alone compiles it; foretell's emulator compiles the same text for the processor (FORETELL_EMULATED).
//
// Every sum is made in single precision or better, in an order that follows from the sizes alone: no atomic addition anywhere.

typedef long long index;
typedef unsigned int word;
typedef unsigned long long long_word;

#ifndef INFINITY
#define INFINITY __int_as_float(0x7F800000)
#endif

#ifndef FORETELL_EMULATED
#define KERNEL(name) extern "C" __global__ void __launch_bounds__(256) name(const __grid_constant__ Arguments arguments)
// Of four warps, each of whose threads has as many registers as there are.
#define TENSOR_KERNEL(name) extern "C" __global__ void __launch_bounds__(128) name(const __grid_constant__ Arguments arguments)
__device__ __forceinline__ float *dynamic_shared() {
    extern __shared__ float4 foretell_shared[];
    return (float *)foretell_shared;
}
#endif

// ---- numbers -----------------------------------------------------------------------------------------------------------------------

struct bf16 {
    unsigned short bits;
};
struct fp16 {
    unsigned short bits;
};

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(bf16 x) { return __uint_as_float((word)x.bits << 16); }
__device__ __forceinline__ float widen(fp16 x) {
#ifdef FORETELL_EMULATED
    return emulated_half_to_single(x.bits);
#else
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
#endif
}

__device__ __forceinline__ void narrow(float &y, float x) { y = x; }
__device__ __forceinline__ void narrow(bf16 &y, float x) {
    // To the nearest, of two equally near the even one; what is no number stays so.
    word bits = __float_as_uint(x);
    y.bits = x != x ? (unsigned short)(bits >> 16 | 0x40) : (unsigned short)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
__device__ __forceinline__ void narrow(fp16 &y, float x) {
#ifdef FORETELL_EMULATED
    y.bits = emulated_single_to_half(x);
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#endif
}

#if PRECISION == 0
typedef float number;
#elif PRECISION == 1
typedef bf16 number;
#else
typedef fp16 number;
#endif

// ---- arguments ---------------------------------------------------------------------------------------------------------------------

// What changes from step to step; it lies at a fixed place of the device's memory, so that a captured graph reads today's.
struct Step {
    double learning_rate;
    double momentum;
    double weight_decay;
    double beta1;
    double beta2;
    double epsilon;
    double gradient_scale;
    double clip_norm;
    index growth_interval;
    long_word step;
    long_word seed;
};

// The first index that was found out of range, if one was: `kernel` is not zero then.
struct Fault {
    int kernel;
    int value;
    index position;
    index limit;
};

struct Arguments {
    const void *reads[8];
    void *writes[8];
    index sizes[24];
    float numbers[8];
    const Step *step;
    Fault *fault;
    void *scratch;
    // Whether to add to what there is.
    index accumulate;
    // What the host knows the kernel by.
    index kernel;
};

template <typename T> __device__ __forceinline__ const T *read(const Arguments &arguments, int place) {
    return (const T *)arguments.reads[place];
}
template <typename T> __device__ __forceinline__ T *written(const Arguments &arguments, int place) {
    return (T *)arguments.writes[place];
}

// Whether an index is below a limit; says so to the host where it is not.
__device__ __forceinline__ bool is_within(const Arguments &arguments, int value, index limit, index position) {
    if (value >= 0 && value < limit) {
        return true;
    }
    if (atomicCAS(&arguments.fault->kernel, 0, (int)arguments.kernel) == 0) {
        arguments.fault->value = value;
        arguments.fault->position = position;
        arguments.fault->limit = limit;
    }
    return false;
}

// ---- threads -----------------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ index this_thread() { return (index)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ __forceinline__ index all_threads() { return (index)gridDim.x * blockDim.x; }

__device__ __forceinline__ float warp_sum(float x) {
    for (int apart = 16; apart > 0; apart /= 2) {
        x += __shfl_xor_sync(0xFFFFFFFFu, x, apart);
    }
    return x;
}

// The sum over all threads of a block of at most 1024, known to each of them.
template <typename T> __device__ T block_sum(T x) {
    __shared__ T sums[32];
    for (int apart = 16; apart > 0; apart /= 2) {
        x += __shfl_xor_sync(0xFFFFFFFFu, x, apart);
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        sums[threadIdx.x / 32] = x;
    }
    __syncthreads();
    T sum = sums[0];
    for (unsigned warp = 1; warp < blockDim.x / 32; warp++) {
        sum += sums[warp];
    }
    return sum;
}

// Adds to what there is where the call says so.
__device__ __forceinline__ void put(const Arguments &arguments, float *place, float value) {
    *place = arguments.accumulate ? *place + value : value;
}

// ---- element by element ------------------------------------------------------------------------------------------------------------

// As many numbers as one access to memory moves.
struct alignas(16) Pack {
    number numbers[16 / sizeof(number)];
};

// y[i] = f(i, reads of i), for `READS` tensors of the run's precision; y may be one of them.
template <int READS, typename F> __device__ __forceinline__ void map_elements(const Arguments &arguments, index elements, F f) {
    const index width = 16 / sizeof(number);
    number *y = written<number>(arguments, 0);
    long_word together = (long_word)y;
    for (int place = 0; place < READS; place++) {
        together |= (long_word)arguments.reads[place];
    }
    const index packs = together % 16 == 0 ? elements / width : 0;
    for (index pack = this_thread(); pack < packs; pack += all_threads()) {
        Pack given[READS], result;
        for (int place = 0; place < READS; place++) {
            given[place] = read<Pack>(arguments, place)[pack];
        }
#pragma unroll
        for (int i = 0; i < (int)width; i++) {
            float x[READS];
            for (int place = 0; place < READS; place++) {
                x[place] = widen(given[place].numbers[i]);
            }
            narrow(result.numbers[i], f(pack * width + i, x));
        }
        ((Pack *)y)[pack] = result;
    }
    for (index i = packs * width + this_thread(); i < elements; i += all_threads()) {
        float x[READS];
        for (int place = 0; place < READS; place++) {
            x[place] = widen(read<number>(arguments, place)[i]);
        }
        narrow(y[i], f(i, x));
    }
}

// The same where what is done to an element follows from its column too, and from the group of so many elements (whole rows) that it is in:
// `load(group, column, constants)` says how, `f(constants, reads)` does it. A thread keeps the constants of its columns for as long as it
// stays in them, which it does where all threads together go on by whole rows: no division and no look-up an element.
template <int READS, int CONSTANTS, typename L, typename F>
__device__ __forceinline__ void map_columns(const Arguments &arguments, index elements, index columns, index group, L load, F f) {
    const int width = 16 / sizeof(number);
    number *y = written<number>(arguments, 0);
    long_word together = (long_word)y | (long_word)(columns * sizeof(number));
    for (int place = 0; place < READS; place++) {
        together |= (long_word)arguments.reads[place];
    }
    const index packs = together % 16 == 0 ? elements / width : 0;
    float constants[width][CONSTANTS];
    index known_group = -1, known_column = -1;
    for (index pack = this_thread(); pack < packs; pack += all_threads()) {
        Pack given[READS], result;
        for (int place = 0; place < READS; place++) {
            given[place] = read<Pack>(arguments, place)[pack];
        }
        const index own_group = pack * width / group, column = pack * width % columns;
        if (own_group != known_group || column != known_column) {
#pragma unroll
            for (int i = 0; i < width; i++) {
                load(own_group, column + i, constants[i]);
            }
            known_group = own_group;
            known_column = column;
        }
#pragma unroll
        for (int i = 0; i < width; i++) {
            float x[READS];
            for (int place = 0; place < READS; place++) {
                x[place] = widen(given[place].numbers[i]);
            }
            narrow(result.numbers[i], f(constants[i], x));
        }
        ((Pack *)y)[pack] = result;
    }
    for (index i = packs * width + this_thread(); i < elements; i += all_threads()) {
        float x[READS];
        for (int place = 0; place < READS; place++) {
            x[place] = widen(read<number>(arguments, place)[i]);
        }
        load(i / group, i % columns, constants[0]);
        narrow(y[i], f(constants[0], x));
    }
}

// ---- dropout -----------------------------------------------------------------------------------------------------------------------

// The hash of foretell's CPU backend (backend/cpu/dropout.rs): whether an element is kept follows from its place in the whole batch.
__device__ __forceinline__ long_word split_mix(long_word state) {
    state += 0x9E3779B97F4A7C15ull;
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9ull;
    state = (state ^ (state >> 27)) * 0x94D049BB133111EBull;
    return state ^ (state >> 31);
}
__device__ __forceinline__ word finalise(word x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}
__device__ __forceinline__ bool is_kept(word place, long_word key, word threshold) {
    return finalise(finalise(place + (word)key) ^ (word)(key >> 32)) >= threshold;
}
// Of the seed, the step and the site.
__device__ __forceinline__ long_word site_key(const Step *step, index site) {
    return split_mix(split_mix(split_mix(step->seed) ^ step->step) ^ (long_word)site);
}

// GELU by the tangent: tanh(u) = 1 - 2 / (1 + e^2u), which keeps its digits on both sides.
__device__ __forceinline__ float gelu_tangent(float x) {
    const float u = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return tanhf(u);
}

__device__ __forceinline__ float gelu_of(float x) { return 0.5f * x * (1.0f + gelu_tangent(x)); }

__device__ __forceinline__ float gelu_slope(float x) {
    const float tangent = gelu_tangent(x), slope = 0.7978845608028654f * (1.0f + 3.0f * 0.044715f * x * x);
    return 0.5f * (1.0f + tangent + x * (1.0f - tangent * tangent) * slope);
}
