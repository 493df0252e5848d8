// Runs the kernels' sources on the CPU, for tests without a GPU.
//
// The threads of a block are fibers that switch at barriers and shuffles. A warp runs as far ahead
// of the others as barriers allow. Blocks run one after the other. Shared memory holds NaNs before
// each block. The emulator checks results and launches; it cannot measure speed, and it does not
// find races between blocks. It needs x86-64.
//
// executor/src/backend/cuda/tests/emulator.rs compiles it, once for each PRECISION.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define FORETELL_EMULATED
// The C library has a function `index`.
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
static inline int atomicCAS(int *address, int compare, int value) {
    int old = *address;
    if (old == compare) {
        *address = value;
    }
    return old;
}

// ---- fibers ----

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
static const int MAX_THREADS = 1024, STACK = 64 * 1024, MAX_SHARED = 227 * 1024;
static Fiber fibers[MAX_THREADS];
static char *stacks;
alignas(16) static char shared_memory[MAX_SHARED];
static void *scheduler;
static int current, threads, alive, arrived;
static unsigned long long block_generation;
static bool or_pending, or_result;
static unsigned long long shuffled[2][MAX_THREADS];
static void (*current_kernel)(const void *);
static const void *current_arguments;

static float *dynamic_shared() { return (float *)shared_memory; }

static void yield() { foretell_switch(&fibers[current].stack_pointer, scheduler); }

static void release_block() {
    if (alive > 0 && arrived == alive) {
        arrived = 0;
        block_generation++;
        or_result = or_pending;
        or_pending = false;
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
    or_pending |= value;
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
// Two buffers alternate, so that a thread that runs ahead does not overwrite values that are still
// to be read.
template <typename T> static T __shfl_xor_sync(unsigned mask, T value, int apart) {
    static_assert(sizeof(T) <= 8, "one word");
    const int turn = fibers[current].warp_syncs % 2;
    memcpy(&shuffled[turn][current], &value, sizeof(T));
    __syncwarp(mask);
    T other;
    memcpy(&other, &shuffled[turn][current ^ apart], sizeof(T));
    return other;
}
static unsigned __ballot_sync(unsigned mask, bool value) {
    const int turn = fibers[current].warp_syncs % 2;
    shuffled[turn][current] = value;
    __syncwarp(mask);
    unsigned ballot = 0;
    for (int lane = 0; lane < 32 && current / 32 * 32 + lane < threads; lane++) {
        ballot |= shuffled[turn][current / 32 * 32 + lane] != 0 ? 1u << lane : 0u;
    }
    return ballot;
}

// ---- tensor cores and asynchronous copies ----

#if PRECISION != 0
// Copies that a thread has started and not waited for. They happen only when it waits, as late as
// the hardware may do them; until then the target holds NaNs.
struct Copy {
    void *to;
    const void *from;
    bool has_data;
};
static const int MAX_COPIES = 256;
static Copy copies[MAX_THREADS][MAX_COPIES];
static int copy_counts[MAX_THREADS];
// Bytes of dynamic shared memory of the current launch.
static int dynamic_bytes;
static bool has_bad_address;

// Checks that an address is 16 aligned bytes of the block's dynamic shared memory.
static bool check_shared_16(const void *pointer) {
    const uintptr_t address = (uintptr_t)pointer, start = (uintptr_t)shared_memory;
    const bool is_valid = address % 16 == 0 && address >= start && address + 16 <= start + dynamic_bytes;
    has_bad_address |= !is_valid;
    return is_valid;
}
static void copy_async(void *to, const void *from, bool has_data) {
    int &count = copy_counts[current];
    has_bad_address |= count == MAX_COPIES || (uintptr_t)from % 16 != 0;
    if (!check_shared_16(to) || has_bad_address) {
        return;
    }
    memset(to, 0xFF, 16);
    copies[current][count++] = Copy{to, from, has_data};
}
static void wait_for_copies() {
    for (int i = 0; i < copy_counts[current]; i++) {
        const Copy &copy = copies[current][i];
        if (copy.has_data) {
            memcpy(copy.to, copy.from, 16);
        } else {
            memset(copy.to, 0, 16);
        }
    }
    copy_counts[current] = 0;
}

// The operands of each thread of a warp in an instruction of the whole warp. Two buffers alternate,
// as in shuffles.
union WarpOperand {
    const void *row;
    // The numbers of four words of the left operand and of two of the right one.
    float numbers[12];
};
static WarpOperand warp_operands[2][MAX_THREADS];
static const WarpOperand *gather(const WarpOperand &own) {
    const int turn = fibers[current].warp_syncs % 2;
    warp_operands[turn][current] = own;
    __syncwarp(0xFFFFFFFFu);
    return warp_operands[turn] + current / 32 * 32;
}
static float widened(unsigned short bits) {
    return PRECISION == 1 ? __uint_as_float((unsigned)bits << 16) : emulated_half_to_single(bits);
}

static void load(unsigned (&to)[4], const void *row, bool transposed) {
    check_shared_16(row);
    const WarpOperand *all = gather(WarpOperand{row});
    const int lane = current % 32;
    for (int matrix = 0; matrix < 4; matrix++) {
        unsigned short two[2];
        for (int i = 0; i < 2; i++) {
            const int r = transposed ? lane % 4 * 2 + i : lane / 4, c = transposed ? lane / 4 : lane % 4 * 2 + i;
            two[i] = has_bad_address ? 0x7FFF : ((const unsigned short *)all[matrix * 8 + r].row)[c];
        }
        to[matrix] = two[0] | (unsigned)two[1] << 16;
    }
}
static void load_matrices(unsigned (&to)[4], const void *row) { load(to, row, false); }
static void load_transposed(unsigned (&to)[4], const void *row) { load(to, row, true); }

// Left operand: word 0 has row lane / 4, columns lane % 4 * 2 and the next; word 1 the row + 8;
// words 2 and 3 the columns + 8. Right operand: word 0 has rows lane % 4 * 2 and the next of column
// lane / 4; word 1 the rows + 8.
static void multiply_add(float (&sum)[4], const unsigned (&left)[4], unsigned right, unsigned right_after) {
    WarpOperand own;
    const unsigned words[6] = {left[0], left[1], left[2], left[3], right, right_after};
    for (int i = 0; i < 12; i++) {
        own.numbers[i] = widened((unsigned short)(words[i / 2] >> i % 2 * 16));
    }
    const WarpOperand *all = gather(own);
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

// For each warp, the number of syncs that all lanes have reached. It saves a look at each lane.
static unsigned long long met[MAX_THREADS / 32];

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

// The body of a fiber.
static void run_fiber() {
    current_kernel(current_arguments);
    fibers[current].is_done = true;
    alive--;
    release_block();
    yield();
}

// Runs one block; returns false if its threads wait for each other forever.
static bool run_block() {
    alive = threads;
    arrived = 0;
    or_pending = false;
    memset(met, 0, sizeof(met));
    for (int thread = 0; thread < threads; thread++) {
        void **top = (void **)(stacks + (size_t)(thread + 1) * STACK);
        top[-1] = nullptr;
        top[-2] = (void *)run_fiber;
        for (int i = 3; i <= 8; i++) {
            top[-i] = nullptr;
        }
        fibers[thread] = Fiber{top - 8, false, NOTHING, 0, 0, 0};
#if PRECISION != 0
        copy_counts[thread] = 0;
#endif
    }
    // Each warp runs as far as it can before the next one, in ascending or descending order. A
    // missing barrier then lets a warp read or write too early, which changes the result.
    const int warps = threads / 32;
    const bool is_backward = (blockIdx.x + blockIdx.y + blockIdx.z) % 2 != 0;
    while (alive > 0) {
        bool has_run = false;
        for (int turn = 0; turn < warps; turn++) {
            const int first = (is_backward ? warps - 1 - turn : turn) * 32;
            for (bool progresses = true; progresses;) {
                progresses = false;
                for (int thread = first; thread < first + 32; thread++) {
                    if (fibers[thread].is_done || !may_run(fibers[thread], thread)) {
                        continue;
                    }
                    has_run = progresses = true;
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

static void *current_function;
static void call_current(const void *arguments) { ((void (*)(const Arguments))current_function)(*(const Arguments *)arguments); }

// Runs a launch. Returns 0, or 1 if threads wait for each other forever, 2 if no GPU takes such a
// launch, or 3 if an instruction got an invalid address.
extern "C" int foretell_emulate(void *function, const unsigned *grid, unsigned block, unsigned shared, const Arguments *arguments) {
    if (block == 0 || block > MAX_THREADS || block % 32 != 0 || shared > MAX_SHARED || grid[1] > 65535 || grid[2] > 65535 ||
        grid[0] == 0 || grid[1] == 0 || grid[2] == 0) {
        return 2;
    }
    if (!stacks) {
        stacks = (char *)aligned_alloc(64, (size_t)MAX_THREADS * STACK);
    }
    threads = (int)block;
#if PRECISION != 0
    dynamic_bytes = (int)shared;
    has_bad_address = false;
#endif
    current_function = function;
    current_kernel = call_current;
    current_arguments = arguments;
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
                if (has_bad_address) {
                    return 3;
                }
#endif
            }
        }
    }
    return 0;
}
extern "C" unsigned foretell_arguments_size() { return sizeof(Arguments); }
