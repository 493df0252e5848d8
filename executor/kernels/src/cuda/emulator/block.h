// Thread blocks. The threads of a block are fibers, which switch at barriers and shuffles.

#pragma once

#include "builtins.h"
#include <link.h>

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

static const int MAX_THREADS = 1024, WARP_SIZE = 32, STACK = 256 * 1024, MAX_SHARED = 227 * 1024;

#if PRECISION != 0
// A copy to shared memory that a thread has started and not waited for.
struct Copy {
    void *to;
    const void *from;
    bool has_data;
};
static const int MAX_COPIES = 256;
// A thread's operand of an instruction of the whole warp.
union WarpOperand {
    const void *row;
    // The numbers of four words of the left operand and of two of the right one.
    float numbers[12];
};
#endif

// A block that is running, with the contents of its shared memory while another block runs.
struct Block {
    dim3 position;
    Fiber fibers[MAX_THREADS];
    char *stacks;
    int alive, arrived;
    unsigned long long generation;
    bool or_pending, or_result;
    // For each warp, the number of syncs that all lanes have reached. It saves a look at each lane.
    unsigned long long met[MAX_THREADS / WARP_SIZE];
    // Two buffers alternate, so that a thread that runs ahead does not overwrite values that are
    // still to be read.
    unsigned long long shuffled[2][MAX_THREADS];
#if PRECISION != 0
    WarpOperand warp_operands[2][MAX_THREADS];
    Copy copies[MAX_THREADS][MAX_COPIES];
    int copy_counts[MAX_THREADS];
#endif
    char *saved_variables, *saved_dynamic;
};
static Block blocks[2];
static Block *block = &blocks[0];
// Dynamic shared memory of the block that is loaded, and its size in this launch.
alignas(16) static char dynamic_memory[MAX_SHARED];
static int dynamic_bytes;
static void *scheduler;
static int current, threads;
// Whether an instruction got an address that it does not take.
static bool has_bad_address;

static float *dynamic_shared() { return (float *)dynamic_memory; }

// ---- shared memory ----

struct Range {
    char *start;
    size_t bytes;
};
static int find_variables(dl_phdr_info *info, size_t, void *found) {
    const uintptr_t own = (uintptr_t)&dynamic_memory;
    bool is_own = false;
    size_t bytes = 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const auto &header = info->dlpi_phdr[i];
        const uintptr_t start = info->dlpi_addr + header.p_vaddr;
        is_own |= header.p_type == PT_LOAD && own >= start && own < start + header.p_memsz;
        bytes = header.p_type == PT_TLS ? header.p_memsz : bytes;
    }
    if (is_own) {
        *(Range *)found = Range{(char *)info->dlpi_tls_data, bytes};
    }
    return is_own;
}
// The memory of all shared variables: this library's thread-local storage. A reference makes the
// loader allocate it.
static thread_local char first_variable;
static Range shared_variables() {
    Range range = {nullptr, 0};
    *(volatile char *)&first_variable = 0;
    dl_iterate_phdr(find_variables, &range);
    return range;
}

// The block whose shared memory is loaded, and the memory of its variables.
static Block *loaded;
static Range variables;
static void load_shared(Block *next) {
    if (loaded == next) {
        return;
    }
    if (loaded) {
        memcpy(loaded->saved_variables, variables.start, variables.bytes);
        memcpy(loaded->saved_dynamic, dynamic_memory, dynamic_bytes);
    }
    memcpy(variables.start, next->saved_variables, variables.bytes);
    memcpy(dynamic_memory, next->saved_dynamic, dynamic_bytes);
    loaded = next;
}

// ---- barriers and shuffles ----

static void yield() { foretell_switch(&block->fibers[current].stack_pointer, scheduler); }

static void release_block() {
    if (block->alive > 0 && block->arrived == block->alive) {
        block->arrived = 0;
        block->generation++;
        block->or_result = block->or_pending;
        block->or_pending = false;
    }
}
static void __syncthreads() {
    Fiber &fiber = block->fibers[current];
    fiber.generation = block->generation;
    fiber.waits = BLOCK;
    block->arrived++;
    release_block();
    yield();
}
static bool __syncthreads_or(bool value) {
    block->or_pending |= value;
    __syncthreads();
    const bool result = block->or_result;
    __syncthreads();
    return result;
}
static void __syncwarp(unsigned mask) {
    Fiber &fiber = block->fibers[current];
    fiber.warp_syncs++;
    fiber.mask = mask;
    fiber.waits = WARP;
    yield();
}
template <typename T> static T __shfl_xor_sync(unsigned mask, T value, int distance) {
    static_assert(sizeof(T) <= 8, "one word");
    const int turn = block->fibers[current].warp_syncs % 2;
    memcpy(&block->shuffled[turn][current], &value, sizeof(T));
    __syncwarp(mask);
    T other;
    memcpy(&other, &block->shuffled[turn][current ^ distance], sizeof(T));
    return other;
}
static unsigned __ballot_sync(unsigned mask, bool value) {
    const int turn = block->fibers[current].warp_syncs % 2, first = current / WARP_SIZE * WARP_SIZE;
    block->shuffled[turn][current] = value;
    __syncwarp(mask);
    unsigned ballot = 0;
    for (int lane = 0; lane < WARP_SIZE && first + lane < threads; lane++) {
        ballot |= block->shuffled[turn][first + lane] != 0 ? 1u << lane : 0u;
    }
    return ballot;
}

// ---- running a block ----

static void (*current_kernel)(const void *);
static const void *current_arguments;

// The body of a fiber.
static void run_fiber() {
    current_kernel(current_arguments);
    block->fibers[current].is_done = true;
    block->alive--;
    release_block();
    yield();
}

// Prepares a block to run, with NaNs in its shared memory.
static void begin_block(Block *next, dim3 position) {
    if (!next->stacks) {
        next->stacks = (char *)aligned_alloc(64, (size_t)MAX_THREADS * STACK);
        next->saved_variables = (char *)malloc(variables.bytes);
        next->saved_dynamic = (char *)malloc(MAX_SHARED);
    }
    if (loaded == next) {
        loaded = nullptr;
    }
    memset(next->saved_variables, 0xFF, variables.bytes);
    memset(next->saved_dynamic, 0xFF, dynamic_bytes);
    next->position = position;
    next->alive = threads;
    next->arrived = 0;
    next->generation = 0;
    next->or_pending = false;
    memset(next->met, 0, sizeof(next->met));
    for (int thread = 0; thread < threads; thread++) {
        void **top = (void **)(next->stacks + (size_t)(thread + 1) * STACK);
        top[-1] = nullptr;
        top[-2] = (void *)run_fiber;
        for (int i = 3; i <= 8; i++) {
            top[-i] = nullptr;
        }
        next->fibers[thread] = Fiber{top - 8, false, NOTHING, 0, 0, 0};
#if PRECISION != 0
        next->copy_counts[thread] = 0;
#endif
    }
}

static bool may_run(const Fiber &fiber, int thread) {
    if (fiber.waits == BLOCK) {
        return fiber.generation != block->generation;
    }
    const int warp = thread / WARP_SIZE;
    if (fiber.waits == WARP && block->met[warp] < fiber.warp_syncs) {
        for (int lane = 0; lane < WARP_SIZE; lane++) {
            const int other = warp * WARP_SIZE + lane;
            if (fiber.mask >> lane & 1 && other < threads && block->fibers[other].warp_syncs < fiber.warp_syncs) {
                return false;
            }
        }
        if (fiber.mask == 0xFFFFFFFFu) {
            block->met[warp] = fiber.warp_syncs;
        }
    }
    return true;
}

// Runs each warp of a block as far as it can before the next one, in ascending or descending order.
// A missing barrier then lets a warp read or write too early, which changes the result. Returns
// whether any thread ran.
static bool run_warps(Block *next, bool is_descending) {
    block = next;
    load_shared(next);
    blockIdx = next->position;
    const int warps = threads / WARP_SIZE;
    bool has_run = false;
    for (int turn = 0; turn < warps; turn++) {
        const int first = (is_descending ? warps - 1 - turn : turn) * WARP_SIZE;
        for (bool progresses = true; progresses;) {
            progresses = false;
            for (int thread = first; thread < first + WARP_SIZE; thread++) {
                if (next->fibers[thread].is_done || !may_run(next->fibers[thread], thread)) {
                    continue;
                }
                has_run = progresses = true;
                next->fibers[thread].waits = NOTHING;
                current = thread;
                threadIdx = dim3{(unsigned)thread, 0, 0};
                foretell_switch(&scheduler, next->fibers[thread].stack_pointer);
            }
        }
    }
    return has_run;
}
