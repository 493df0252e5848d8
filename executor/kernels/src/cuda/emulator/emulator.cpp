// Runs the kernels' sources on the CPU, for tests without a GPU.
//
// A warp runs as far ahead of the others as barriers allow. Blocks run in one of three orders,
// which alternate from launch to launch: one after the other; two at a time, which take turns
// whenever all their warps wait; and the same from the last block to the first. A kernel whose
// blocks depend on each other therefore gives different results. Before a block runs, its shared
// memory holds NaNs.
//
// The emulator checks results and launches. It cannot measure speed. It needs x86-64.
//
// executor/kernels/src/cuda/tests/emulator.rs compiles it, once for each PRECISION. With
// FORETELL_FAULTS it has kernels with planted faults instead.

#include "tensor_cores.h"

// A process loads one library per precision. By default the shared variables of templates and of
// inline functions would be one for all libraries (STB_GNU_UNIQUE), and a library would neither
// swap nor poison the variables that its kernels use. Hidden symbols belong to their library.
#pragma GCC visibility push(hidden)
#define EXPORTED extern "C" __attribute__((visibility("default")))

struct Arguments;
typedef void (*Kernel)(const Arguments);
struct RegisteredKernel {
    const char *name;
    Kernel function;
};
static const int MAX_KERNELS = 256;
static RegisteredKernel registered[MAX_KERNELS];
static int registered_count;
static bool register_kernel(const char *name, Kernel function) {
    registered[registered_count++] = RegisteredKernel{name, function};
    return true;
}

#include "common.cuh"
#ifdef FORETELL_FAULTS
#include "faults.cu"
#else
#include "attention.cuh"
#include "attention_kernels.cuh"
#include "attention.cu"
#include "attention_zigzag.cu"
#if PRECISION != 0
#include "tensor.cuh"
#include "attention_tensor_kernels.cuh"
#include "attention_tensor.cu"
#include "attention_tensor_zigzag.cu"
#endif
#include "compression.cu"
#include "cross_entropy.cu"
#include "elementwise.cu"
#include "fp8.cu"
#include "images.cu"
#include "lstm.cu"
#include "mixture.cu"
#include "movement.cu"
#include "norms.cu"
#include "optimizers.cu"
#include "product.cu"
#include "rope.cu"
#include "sums.cu"
#endif

static Kernel current_function;
static void call_current(const void *arguments) { current_function(*(const Arguments *)arguments); }

enum Order { ONE_BY_ONE, PAIRS, PAIRS_DESCENDING, ORDERS };
static unsigned launches;

// Runs blocks until all are done; returns false if their threads wait for each other forever.
static bool run_blocks(Block *const *running, int count) {
    for (bool has_run = true; has_run;) {
        has_run = false;
        for (int i = 0; i < count; i++) {
            const dim3 position = running[i]->position;
            const bool is_descending = (position.x + position.y + position.z) % 2 != 0;
            has_run |= running[i]->alive > 0 && run_warps(running[i], is_descending);
        }
    }
    for (int i = 0; i < count; i++) {
        if (running[i]->alive > 0) {
            return false;
        }
    }
    return true;
}

// Returns a kernel by name; null if there is none.
EXPORTED void *foretell_find(const char *name) {
    for (int i = 0; i < registered_count; i++) {
        if (strcmp(registered[i].name, name) == 0) {
            return (void *)registered[i].function;
        }
    }
    return nullptr;
}

// Runs a launch. Returns 0, or 1 if threads wait for each other forever, 2 if no GPU takes such a
// launch, or 3 if an instruction got an invalid address.
EXPORTED int foretell_emulate(void *function, const unsigned *grid, unsigned block_threads, unsigned shared,
                                const Arguments *arguments) {
    if (block_threads == 0 || block_threads > MAX_THREADS || block_threads % WARP_SIZE != 0 || shared > MAX_SHARED ||
        grid[1] > 65535 || grid[2] > 65535 || grid[0] == 0 || grid[1] == 0 || grid[2] == 0) {
        return 2;
    }
    threads = (int)block_threads;
    dynamic_bytes = (int)shared;
    has_bad_address = false;
    current_function = (Kernel)function;
    current_kernel = call_current;
    current_arguments = arguments;
    gridDim = dim3{grid[0], grid[1], grid[2]};
    blockDim = dim3{block_threads, 1, 1};
    // Another thread of the process may have made the last launch, with its own copy of the
    // variables.
    variables = shared_variables();
    loaded = nullptr;
    const Order order = (Order)(launches++ % ORDERS);
    const unsigned long long count = (unsigned long long)grid[0] * grid[1] * grid[2];
    const int pair = order == ONE_BY_ONE ? 1 : 2;
    for (unsigned long long done = 0; done < count; done += pair) {
        Block *running[2];
        int running_count = 0;
        for (unsigned long long i = done; i < done + pair && i < count; i++) {
            const unsigned long long number = order == PAIRS_DESCENDING ? count - 1 - i : i;
            const dim3 position = {(unsigned)(number % grid[0]), (unsigned)(number / grid[0] % grid[1]),
                                   (unsigned)(number / grid[0] / grid[1])};
            running[running_count] = &blocks[running_count];
            begin_block(running[running_count++], position);
        }
        if (!run_blocks(running, running_count)) {
            return 1;
        }
        if (has_bad_address) {
            return 3;
        }
    }
    return 0;
}
EXPORTED unsigned foretell_arguments_size() { return sizeof(Arguments); }

#pragma GCC visibility pop
