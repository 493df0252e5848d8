// Runs the text of CUDA kernels on the processor, for tests where there is no GPU: the threads of a block are fibers that take turns at
// barriers and shuffles, blocks run one after the other. What it shows is that kernels and launches compute what they should; not that they
// are fast, and not races between blocks. Shared memory is filled with what is no number before each block. x86-64 alone.
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
static const int MOST_THREADS = 1024, STACK = 64 * 1024, SHARED = 256 * 1024;
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

static bool may_run(const Fiber &fiber, int thread) {
    if (fiber.waits == BLOCK) {
        return fiber.generation != block_generation;
    }
    if (fiber.waits == WARP) {
        for (int lane = 0; lane < 32; lane++) {
            const int other = thread / 32 * 32 + lane;
            if (fiber.mask >> lane & 1 && other < threads && fibers[other].warp_syncs < fiber.warp_syncs) {
                return false;
            }
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
    for (int thread = 0; thread < threads; thread++) {
        void **top = (void **)(stacks + (size_t)(thread + 1) * STACK);
        top[-1] = nullptr;
        top[-2] = (void *)live;
        for (int i = 3; i <= 8; i++) {
            top[-i] = nullptr;
        }
        fibers[thread] = Fiber{top - 8, false, NOTHING, 0, 0, 0};
    }
    while (alive > 0) {
        bool has_run = false;
        for (int thread = 0; thread < threads; thread++) {
            if (fibers[thread].is_done || !may_run(fibers[thread], thread)) {
                continue;
            }
            has_run = true;
            fibers[thread].waits = NOTHING;
            current = thread;
            threadIdx = dim3{(unsigned)thread, 0, 0};
            foretell_switch(&scheduler, fibers[thread].stack_pointer);
        }
        if (!has_run) {
            return false;
        }
    }
    return true;
}


#include "common.cuh"
#include "attention.cu"
#include "cross_entropy.cu"
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

// Runs a kernel; 0, or 1 where its threads wait for each other forever, or 2 where it is launched as no GPU could.
extern "C" int foretell_emulate(void *function, const unsigned *grid, unsigned block, unsigned shared, const Arguments *arguments) {
    if (block == 0 || block > MOST_THREADS || block % 32 != 0 || shared > SHARED || grid[1] > 65535 || grid[2] > 65535 ||
        grid[0] == 0 || grid[1] == 0 || grid[2] == 0) {
        return 2;
    }
    if (!stacks) {
        stacks = (char *)aligned_alloc(64, (size_t)MOST_THREADS * STACK);
    }
    threads = (int)block;
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
            }
        }
    }
    return 0;
}
extern "C" unsigned foretell_arguments_size() { return sizeof(Arguments); }
