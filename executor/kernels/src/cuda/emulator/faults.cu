// Kernels with planted faults. `tests/faults.rs` checks that the emulator finds each. sizes:
// elements

// The reverse of 256 elements in a block, by way of shared memory. Without its barrier a warp reads
// what another has not written.
KERNEL(missing_barrier) {
    __shared__ float tile[256];
    tile[threadIdx.x] = read<float>(arguments, 0)[threadIdx.x];
    written<float>(arguments, 0)[threadIdx.x] = tile[255 - threadIdx.x];
}

// The sum of a block. Shared memory that no thread has written is not zero.
KERNEL(uninitialised_shared_memory) {
    __shared__ float sums[32];
    if (threadIdx.x == 0) {
        sums[0] += 1.0f;
        written<float>(arguments, 0)[blockIdx.x] = sums[0];
    }
}

// The same in a template, of which all libraries of kernels have an instance. It leaves a number
// for the next block, and for the next library if they shared the variable.
template <typename T> __device__ __forceinline__ T unwritten_word() {
    __shared__ T words[32];
    const T before = words[0];
    words[0] = T(7);
    return before;
}
KERNEL(uninitialised_shared_memory_of_a_template) {
    if (threadIdx.x == 0) {
        written<float>(arguments, 0)[blockIdx.x] = unwritten_word<float>();
    }
}

// A running sum over blocks. It is right only if each block starts after the one before it has
// ended.
KERNEL(dependent_blocks) {
    float *y = written<float>(arguments, 0);
    const float before = blockIdx.x > 0 ? y[blockIdx.x - 1] : 0.0f;
    __syncthreads();
    if (threadIdx.x == 0) {
        y[blockIdx.x] = before + read<float>(arguments, 0)[blockIdx.x];
    }
}

// A barrier that one warp does not reach, because it waits for a shuffle with another warp's mask.
KERNEL(divergent_barrier) {
    if (threadIdx.x < 32) {
        __syncthreads();
    } else {
        __syncwarp(0xFFFFFFFFu);
        while (threadIdx.x == 32) {
            __syncwarp(0x3u);
        }
        __syncthreads();
    }
}

// A 16-byte access at an address that is aligned to 4 bytes.
KERNEL(misaligned_access) {
    if (threadIdx.x == 0) {
        *(Pack *)(written<float>(arguments, 0) + 1) = *(const Pack *)(read<float>(arguments, 0));
    }
}

// An access one element beyond an operand.
KERNEL(out_of_bounds) {
    for (index i = thread_index(); i <= arguments.sizes[0]; i += thread_count()) {
        written<float>(arguments, 0)[i] = 1.0f;
    }
}

// A shift by as many bits as the type has.
KERNEL(undefined_shift) {
    written<int>(arguments, 0)[threadIdx.x] = 1 << (int)(arguments.sizes[0] + 31);
}

// No fault.
KERNEL(no_fault) {
    __shared__ float tile[256];
    tile[threadIdx.x] = read<float>(arguments, 0)[threadIdx.x];
    __syncthreads();
    written<float>(arguments, 0)[threadIdx.x] = tile[255 - threadIdx.x];
}
