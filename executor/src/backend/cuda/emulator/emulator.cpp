// Runs the text of CUDA kernels on the processor, for tests where there is no GPU: the threads of a block are fibers that take turns at
// barriers and shuffles, warps run as far ahead of each other as barriers let them, blocks run one after the other. What it shows is that
// kernels and launches compute what they should; not that they are fast, and not races between blocks. Shared memory is filled with what is no number before each block. x86-64 alone.
// Compiled by executor/src/backend/cuda/tests/emulator.rs, once for each PRECISION.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define FORETELL_EMULATED
// One of the C library's functions has this name.
#define index foretell_index
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define KERNEL(name) extern "C" void name(const Arguments arguments)
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
static inline int atomicCAS(int *place, int compare, int value) {
    int old = *place;
    if (old == compare) {
        *place = value;
    }
    return old;
}

// ---- fibers ------------------------------------------------------------------------------------------------------------------------

extern "C" void foretell_switch(void **save, void *load);
asm(".text\n.type foretell_switch,@function\nforetell_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp, (%rdi)\nmovq %rsi, %rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n");

enum Waits { NOTHING, BLOCK, WARP };
struct Fiber {
    void *stack_pointer;
    bool is_done;
    Waits waits;
    unsigned long long generation, warp_syncs;
    unsigned mask;
};
static const int MOST_THREADS = 1024, STACK = 64 * 1024, SHARED = 227 * 1024;
static Fiber fibers[MOST_THREADS];
static char *stacks;
alignas(16) static char shared_memory[SHARED];
static void *scheduler;
static int current, threads, alive, arrived;
static unsigned long long block_generation;
static bool or_now, or_result;
static unsigned long long exchanged[2][MOST_THREADS];
static void (*kernel_now)(const void *);
static const void *arguments_now;

static float *dynamic_shared() { return (float *)shared_memory; }

static void yield() { foretell_switch(&fibers[current].stack_pointer, scheduler); }

static void release_block() {
    if (alive > 0 && arrived == alive) {
        arrived = 0;
        block_generation++;
        or_result = or_now;
        or_now = false;
    }
}
static void __syncthreads() {
    Fiber &fiber = fibers[current];
    fiber.generation = block_generation;
    fiber.waits = BLOCK;
    arrived++;
    release_block();
    yield();
}
static bool __syncthreads_or(bool value) {
    or_now |= value;
    __syncthreads();
    const bool result = or_result;
    __syncthreads();
    return result;
}
static void __syncwarp(unsigned mask) {
    Fiber &fiber = fibers[current];
    fiber.warp_syncs++;
    fiber.mask = mask;
    fiber.waits = WARP;
    yield();
}
// Two places in turn, so that who is ahead does not write over what others still read.
template <typename T> static T __shfl_xor_sync(unsigned mask, T value, int apart) {
    static_assert(sizeof(T) <= 8, "one word");
    const int turn = fibers[current].warp_syncs % 2;
    memcpy(&exchanged[turn][current], &value, sizeof(T));
    __syncwarp(mask);
    T other;
    memcpy(&other, &exchanged[turn][current ^ apart], sizeof(T));
    return other;
}
static unsigned __ballot_sync(unsigned mask, bool value) {
    const int turn = fibers[current].warp_syncs % 2;
    exchanged[turn][current] = value;
    __syncwarp(mask);
    unsigned ballot = 0;
    for (int lane = 0; lane < 32 && current / 32 * 32 + lane < threads; lane++) {
        ballot |= exchanged[turn][current / 32 * 32 + lane] != 0 ? 1u << lane : 0u;
    }
    return ballot;
}

// ---- tensor cores and asynchronous copies ------------------------------------------------------------------------------------------

#if PRECISION != 0
// What a thread has asked to be copied and not waited for: as late as the hardware may, so that who reads too early finds no numbers.
struct Copy {
    void *to;
    const void *from;
    bool is_there;
};
static const int MOST_COPIES = 256;
static Copy copies[MOST_THREADS][MOST_COPIES];
static int copy_counts[MOST_THREADS];
static int shared_now;
static bool is_misused;

// Sixteen bytes of the block's shared memory, where instructions ask for that.
static bool is_shared_line(const void *pointer) {
    const uintptr_t place = (uintptr_t)pointer, start = (uintptr_t)shared_memory;
    const bool is_line = place % 16 == 0 && place >= start && place + 16 <= start + shared_now;
    is_misused |= !is_line;
    return is_line;
}
static void copy_later(void *to, const void *from, bool is_there) {
    int &count = copy_counts[current];
    is_misused |= count == MOST_COPIES || (uintptr_t)from % 16 != 0;
    if (!is_shared_line(to) || is_misused) {
        return;
    }
    memset(to, 0xFF, 16);
    copies[current][count++] = Copy{to, from, is_there};
}
static void wait_for_copies() {
    for (int i = 0; i < copy_counts[current]; i++) {
        const Copy &copy = copies[current][i];
        if (copy.is_there) {
            memcpy(copy.to, copy.from, 16);
        } else {
            memset(copy.to, 0, 16);
        }
    }
    copy_counts[current] = 0;
}

// What each thread of a warp brings to an instruction of the whole warp; two places in turn, as in shuffles.
union Brought {
    const void *row;
    // The numbers of four words of the left factor and of two of the right one.
    float numbers[12];
};
static Brought brought[2][MOST_THREADS];
static const Brought *bring(const Brought &own) {
    const int turn = fibers[current].warp_syncs % 2;
    brought[turn][current] = own;
    __syncwarp(0xFFFFFFFFu);
    return brought[turn] + current / 32 * 32;
}
static float widened(unsigned short bits) {
    return PRECISION == 1 ? __uint_as_float((unsigned)bits << 16) : emulated_half_to_single(bits);
}

static void load(unsigned (&to)[4], const void *row, bool transposed) {
    is_shared_line(row);
    const Brought *all = bring(Brought{row});
    const int lane = current % 32;
    for (int matrix = 0; matrix < 4; matrix++) {
        unsigned short two[2];
        for (int i = 0; i < 2; i++) {
            const int r = transposed ? lane % 4 * 2 + i : lane / 4, c = transposed ? lane / 4 : lane % 4 * 2 + i;
            two[i] = is_misused ? 0x7FFF : ((const unsigned short *)all[matrix * 8 + r].row)[c];
        }
        to[matrix] = two[0] | (unsigned)two[1] << 16;
    }
}
static void load_matrices(unsigned (&to)[4], const void *row) { load(to, row, false); }
static void load_transposed(unsigned (&to)[4], const void *row) { load(to, row, true); }

// Of the left factor word 0 has row lane / 4 and columns lane % 4 * 2 and the next, word 1 the row eight further, words 2 and 3 the columns
// eight further; of the right one word 0 has rows lane % 4 * 2 and the next, word 1 those eight further, of column lane / 4.
static void multiply_add(float (&sum)[4], const unsigned (&left)[4], unsigned right, unsigned right_after) {
    Brought own;
    const unsigned words[6] = {left[0], left[1], left[2], left[3], right, right_after};
    for (int i = 0; i < 12; i++) {
        own.numbers[i] = widened((unsigned short)(words[i / 2] >> i % 2 * 16));
    }
    const Brought *all = bring(own);
    const int lane = current % 32;
    for (int place = 0; place < 4; place++) {
        const int row = lane / 4 + place / 2 * 8, column = lane % 4 * 2 + place % 2;
        double total = sum[place];
        for (int k = 0; k < 16; k++) {
            const float a = all[row % 8 * 4 + k % 8 / 2].numbers[(row / 8 + k / 8 * 2) * 2 + k % 2];
            const float b = all[column * 4 + k % 8 / 2].numbers[8 + k / 8 * 2 + k % 2];
            total += (double)a * b;
        }
        sum[place] = (float)total;
    }
}
static unsigned narrowed(float x) {
    if (PRECISION == 2) {
        return emulated_single_to_half(x);
    }
    const unsigned bits = __float_as_uint(x);
    return x != x ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
static unsigned pack(float low, float high) { return narrowed(low) | narrowed(high) << 16; }
static float power_of_two(float x) { return exp2f(x); }
#endif

// How often all lanes of a warp have met: who waits for no more than that need not look at each of them.
static unsigned long long met[MOST_THREADS / 32];

static bool may_run(const Fiber &fiber, int thread) {
    if (fiber.waits == BLOCK) {
        return fiber.generation != block_generation;
    }
    if (fiber.waits == WARP && met[thread / 32] < fiber.warp_syncs) {
        for (int lane = 0; lane < 32; lane++) {
            const int other = thread / 32 * 32 + lane;
            if (fiber.mask >> lane & 1 && other < threads && fibers[other].warp_syncs < fiber.warp_syncs) {
                return false;
            }
        }
        if (fiber.mask == 0xFFFFFFFFu) {
            met[thread / 32] = fiber.warp_syncs;
        }
    }
    return true;
}

static void live() {
    kernel_now(arguments_now);
    fibers[current].is_done = true;
    alive--;
    release_block();
    yield();
}

static bool run_block() {
    alive = threads;
    arrived = 0;
    or_now = false;
    memset(met, 0, sizeof(met));
    for (int thread = 0; thread < threads; thread++) {
        void **top = (void **)(stacks + (size_t)(thread + 1) * STACK);
        top[-1] = nullptr;
        top[-2] = (void *)live;
        for (int i = 3; i <= 8; i++) {
            top[-i] = nullptr;
        }
        fibers[thread] = Fiber{top - 8, false, NOTHING, 0, 0, 0};
#if PRECISION != 0
        copy_counts[thread] = 0;
#endif
    }
    // A warp runs as far as it can before the next one does, from the first on or from the last: what a barrier's absence would let it see
    // too early, or write too early, then shows.
    const int warps = threads / 32;
    const bool is_backward = (blockIdx.x + blockIdx.y + blockIdx.z) % 2 != 0;
    while (alive > 0) {
        bool has_run = false;
        for (int turn = 0; turn < warps; turn++) {
            const int first = (is_backward ? warps - 1 - turn : turn) * 32;
            for (bool goes_on = true; goes_on;) {
                goes_on = false;
                for (int thread = first; thread < first + 32; thread++) {
                    if (fibers[thread].is_done || !may_run(fibers[thread], thread)) {
                        continue;
                    }
                    has_run = goes_on = true;
                    fibers[thread].waits = NOTHING;
                    current = thread;
                    threadIdx = dim3{(unsigned)thread, 0, 0};
                    foretell_switch(&scheduler, fibers[thread].stack_pointer);
                }
            }
        }
        if (!has_run) {
            return false;
        }
    }
    return true;
}

#include "common.cuh"
#include "attention.cuh"
#include "attention.cu"
#if PRECISION != 0
#include "tensor.cuh"
#include "attention_tensor.cu"
#endif
#include "cross_entropy.cu"
#include "fp8.cu"
#include "elementwise.cu"
#include "images.cu"
#include "lstm.cu"
#include "mixture.cu"
#include "movement.cu"
#include "norms.cu"
#include "optimizers.cu"
#include "product.cu"
#include "rope.cu"
#include "sums.cu"

static void *function_now;
static void call_now(const void *arguments) { ((void (*)(const Arguments))function_now)(*(const Arguments *)arguments); }

// Runs a kernel; 0, or 1 where its threads wait for each other forever, or 2 where it is launched as no GPU could, or 3
// where an instruction is given an address that it cannot take.
extern "C" int foretell_emulate(void *function, const unsigned *grid, unsigned block, unsigned shared, const Arguments *arguments) {
    if (block == 0 || block > MOST_THREADS || block % 32 != 0 || shared > SHARED || grid[1] > 65535 || grid[2] > 65535 ||
        grid[0] == 0 || grid[1] == 0 || grid[2] == 0) {
        return 2;
    }
    if (!stacks) {
        stacks = (char *)aligned_alloc(64, (size_t)MOST_THREADS * STACK);
    }
    threads = (int)block;
#if PRECISION != 0
    shared_now = (int)shared;
    is_misused = false;
#endif
    function_now = function;
    kernel_now = call_now;
    arguments_now = arguments;
    gridDim = dim3{grid[0], grid[1], grid[2]};
    blockDim = dim3{block, 1, 1};
    for (unsigned z = 0; z < grid[2]; z++) {
        for (unsigned y = 0; y < grid[1]; y++) {
            for (unsigned x = 0; x < grid[0]; x++) {
                blockIdx = dim3{x, y, z};
                memset(shared_memory, 0xFF, shared);
                if (!run_block()) {
                    return 1;
                }
#if PRECISION != 0
                if (is_misused) {
                    return 3;
                }
#endif
            }
        }
    }
    return 0;
}
extern "C" unsigned foretell_arguments_size() { return sizeof(Arguments); }
