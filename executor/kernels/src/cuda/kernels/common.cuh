// Shared by all kernels: number formats, the one structure of arguments, sums over a block, and the
// report of an index that is out of range.
//
// This text precedes each source file. It is compiled once for each precision: PRECISION is 0 for
// fp32, 1 for bf16, 2 for fp16. It includes no CUDA header, so NVRTC alone suffices. Foretell's
// emulator compiles the same text for the CPU (FORETELL_EMULATED).
//
// Every sum is in single precision or better. Its order depends on the sizes alone: no kernel adds
// atomically.

typedef long long index;
typedef unsigned int word;
typedef unsigned long long long_word;

#ifndef INFINITY
#define INFINITY __int_as_float(0x7F800000)
#endif

#ifndef FORETELL_EMULATED
#define KERNEL(name) extern "C" __global__ void __launch_bounds__(256) name(const __grid_constant__ Arguments arguments)
// Blocks of four warps, whose threads may use all registers.
#define TENSOR_KERNEL(name) extern "C" __global__ void __launch_bounds__(128) name(const __grid_constant__ Arguments arguments)
__device__ __forceinline__ float *dynamic_shared() {
    extern __shared__ float4 foretell_shared[];
    return (float *)foretell_shared;
}
#endif

// ---- number formats ----

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
    // Rounds to nearest, ties to even. A NaN stays one.
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

// The run's precision.
#if PRECISION == 0
typedef float number;
#elif PRECISION == 1
typedef bf16 number;
#else
typedef fp16 number;
#endif

// ---- arguments ----

// Values that change from step to step. They stay at one address, so that a captured graph reads
// the current ones.
struct StepParameters {
    double learning_rate;
    double momentum;
    double weight_decay;
    double beta1;
    double beta2;
    double epsilon;
    double gradient_scale;
    double clip_norm;
    double outer_learning_rate;
    double outer_momentum;
    double outer_mixing;
    index growth_interval;
    long_word step;
    long_word seed;
};

// An index that a kernel found out of range: that of the first kernel that found one, at the
// smallest position.
struct IndexFault {
    // The kernel's number; 0 if every index was in range.
    int kernel;
    int value;
    index position;
    index limit;
    // 1 while a thread reads and writes the others.
    int lock;
    int padding;
};

// The one argument of every kernel. Each kernel documents its operands, sizes and numbers.
struct Arguments {
    const void *reads[8];
    void *writes[8];
    index sizes[24];
    float numbers[8];
    const StepParameters *step;
    IndexFault *fault;
    void *scratch;
    // Not 0 to add to what is written instead of overwriting it.
    index accumulate;
    // Number that identifies the kernel in an IndexFault, from 1.
    index kernel;
};

// The position that is stored at an index of a zigzag order: each of `ranks` has a chunk from the
// beginning of a sequence, then one from its end. Without an order, where `chunk` is 0, the index.
__device__ __forceinline__ index position_at(index at, index ranks, index chunk) {
    if (chunk == 0) {
        return at;
    }
    const index number = at / chunk, rank = number / 2;
    return (number % 2 == 0 ? rank : 2 * ranks - 1 - rank) * chunk + at % chunk;
}

template <typename T> __device__ __forceinline__ const T *read(const Arguments &arguments, int operand) {
    return (const T *)arguments.reads[operand];
}
template <typename T> __device__ __forceinline__ T *written(const Arguments &arguments, int operand) {
    return (T *)arguments.writes[operand];
}

// Reports an index that is out of range. Threads take turns, so that the report does not depend on
// which of them comes first.
__device__ __forceinline__ void report_index(const Arguments &arguments, int value, index limit, index position) {
    volatile IndexFault *fault = arguments.fault;
    for (bool has_reported = false; !has_reported;) {
        if (atomicCAS(&arguments.fault->lock, 0, 1) != 0) {
            continue;
        }
        __threadfence();
        const int kernel = (int)arguments.kernel;
        if (fault->kernel == 0 || (fault->kernel == kernel && position < fault->position)) {
            fault->kernel = kernel;
            fault->value = value;
            fault->position = position;
            fault->limit = limit;
        }
        __threadfence();
        atomicExch(&arguments.fault->lock, 0);
        has_reported = true;
    }
}

// Returns whether an index is in [0, limit); reports it to the host if not.
__device__ __forceinline__ bool is_within(const Arguments &arguments, int value, index limit, index position) {
    if (value >= 0 && value < limit) {
        return true;
    }
    report_index(arguments, value, limit, position);
    return false;
}

// ---- threads ----

// The thread's index in the grid's first dimension, and the number of threads there. Kernels loop
// over elements with these as start and stride.
__device__ __forceinline__ index thread_index() { return (index)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ __forceinline__ index thread_count() { return (index)gridDim.x * blockDim.x; }

__device__ __forceinline__ float warp_sum(float x) {
    for (int distance = 16; distance > 0; distance /= 2) {
        x += __shfl_xor_sync(0xFFFFFFFFu, x, distance);
    }
    return x;
}

// The sum over all threads of a block, at most 1024; every thread gets it.
template <typename T> __device__ T block_sum(T x) {
    __shared__ T sums[32];
    for (int distance = 16; distance > 0; distance /= 2) {
        x += __shfl_xor_sync(0xFFFFFFFFu, x, distance);
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

// Stores a value, or adds it if the call accumulates.
__device__ __forceinline__ void store(const Arguments &arguments, float *target, float value) {
    *target = arguments.accumulate ? *target + value : value;
}

// ---- elementwise ----

// The numbers that one memory access moves.
struct alignas(16) Pack {
    number numbers[16 / sizeof(number)];
};

// y[i] = f(i, x[i]) for `READS` tensors x in the run's precision. y may be one of them.
template <int READS, typename F> __device__ __forceinline__ void map_elements(const Arguments &arguments, index elements, F f) {
    const index width = 16 / sizeof(number);
    number *y = written<number>(arguments, 0);
    long_word addresses = (long_word)y;
    for (int operand = 0; operand < READS; operand++) {
        addresses |= (long_word)arguments.reads[operand];
    }
    const index packs = addresses % 16 == 0 ? elements / width : 0;
    for (index pack = thread_index(); pack < packs; pack += thread_count()) {
        Pack given[READS], result;
        for (int operand = 0; operand < READS; operand++) {
            given[operand] = read<Pack>(arguments, operand)[pack];
        }
#pragma unroll
        for (int i = 0; i < (int)width; i++) {
            float x[READS];
            for (int operand = 0; operand < READS; operand++) {
                x[operand] = widen(given[operand].numbers[i]);
            }
            narrow(result.numbers[i], f(pack * width + i, x));
        }
        ((Pack *)y)[pack] = result;
    }
    for (index i = packs * width + thread_index(); i < elements; i += thread_count()) {
        float x[READS];
        for (int operand = 0; operand < READS; operand++) {
            x[operand] = widen(read<number>(arguments, operand)[i]);
        }
        narrow(y[i], f(i, x));
    }
}

// y[i] = f(constants, x[i]), where the constants depend on the element's column and group. A group
// is `group` consecutive elements, which are whole rows. `load(group, column, constants)` fetches
// them. A thread reloads them only when its columns or its group change, which is never if the
// stride of all threads is a multiple of a row.
template <int READS, int CONSTANTS, typename L, typename F>
__device__ __forceinline__ void map_columns(const Arguments &arguments, index elements, index columns, index group, L load, F f) {
    const int width = 16 / sizeof(number);
    number *y = written<number>(arguments, 0);
    long_word addresses = (long_word)y | (long_word)(columns * sizeof(number));
    for (int operand = 0; operand < READS; operand++) {
        addresses |= (long_word)arguments.reads[operand];
    }
    const index packs = addresses % 16 == 0 ? elements / width : 0;
    float constants[width][CONSTANTS];
    index loaded_group = -1, loaded_column = -1;
    for (index pack = thread_index(); pack < packs; pack += thread_count()) {
        Pack given[READS], result;
        for (int operand = 0; operand < READS; operand++) {
            given[operand] = read<Pack>(arguments, operand)[pack];
        }
        const index own_group = pack * width / group, column = pack * width % columns;
        if (own_group != loaded_group || column != loaded_column) {
#pragma unroll
            for (int i = 0; i < width; i++) {
                load(own_group, column + i, constants[i]);
            }
            loaded_group = own_group;
            loaded_column = column;
        }
#pragma unroll
        for (int i = 0; i < width; i++) {
            float x[READS];
            for (int operand = 0; operand < READS; operand++) {
                x[operand] = widen(given[operand].numbers[i]);
            }
            narrow(result.numbers[i], f(constants[i], x));
        }
        ((Pack *)y)[pack] = result;
    }
    for (index i = packs * width + thread_index(); i < elements; i += thread_count()) {
        float x[READS];
        for (int operand = 0; operand < READS; operand++) {
            x[operand] = widen(read<number>(arguments, operand)[i]);
        }
        load(i / group, i % columns, constants[0]);
        narrow(y[i], f(constants[0], x));
    }
}

// ---- dropout ----

// The hash of the CPU backend (backend/cpu/dropout.rs). Whether an element is kept depends on its
// position in the whole batch, so every layout drops the same elements.
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
__device__ __forceinline__ bool is_kept(word position, long_word key, word threshold) {
    return finalise(finalise(position + (word)key) ^ (word)(key >> 32)) >= threshold;
}
// The key of a dropout site in this step.
__device__ __forceinline__ long_word site_key(const StepParameters *step, index site) {
    return split_mix(split_mix(split_mix(step->seed) ^ step->step) ^ (long_word)site);
}

// ---- GELU by its tanh approximation ----

__device__ __forceinline__ float gelu_tanh(float x) {
    const float u = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return tanhf(u);
}

__device__ __forceinline__ float tanh_gelu(float x) { return 0.5f * x * (1.0f + gelu_tanh(x)); }

__device__ __forceinline__ float tanh_gelu_derivative(float x) {
    const float tanh_u = gelu_tanh(x), du_dx = 0.7978845608028654f * (1.0f + 3.0f * 0.044715f * x * x);
    return 0.5f * (1.0f + tanh_u + x * (1.0f - tanh_u * tanh_u) * du_dx);
}
