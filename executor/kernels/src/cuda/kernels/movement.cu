// Strided copies, and embeddings.

// A strided copy over three counters, in units of 2, 4 or 16 bytes. sizes: three extents, three
// strides of the source, three of the target, offset in the source, offset in the target
template <typename Unit> __device__ __forceinline__ void strided_copy(const Arguments &arguments) {
    const Unit *from = (const Unit *)arguments.reads[0] + arguments.sizes[9];
    Unit *to = (Unit *)arguments.writes[0] + arguments.sizes[10];
    const index *extents = arguments.sizes, *read_strides = arguments.sizes + 3, *write_strides = arguments.sizes + 6;
    const index elements = extents[0] * extents[1] * extents[2];
    for (index i = thread_index(); i < elements; i += thread_count()) {
        const index inner = i % extents[2], middle = i / extents[2] % extents[1], outer = i / extents[2] / extents[1];
        to[outer * write_strides[0] + middle * write_strides[1] + inner * write_strides[2]] =
            from[outer * read_strides[0] + middle * read_strides[1] + inner * read_strides[2]];
    }
}

KERNEL(copy_2) { strided_copy<unsigned short>(arguments); }
KERNEL(copy_4) { strided_copy<word>(arguments); }
struct alignas(16) FourWords {
    word words[4];
};
KERNEL(copy_16) { strided_copy<FourWords>(arguments); }

// Copies rows from one pitch to another. One block for each row.
// sizes: rows, elements of a row, pitch of the source, pitch of the target
KERNEL(copy_to_pitch) {
    const index columns = arguments.sizes[1];
    for (index row = blockIdx.x; row < arguments.sizes[0]; row += gridDim.x) {
        const number *__restrict__ from = read<number>(arguments, 0) + row * arguments.sizes[2];
        number *__restrict__ to = written<number>(arguments, 0) + row * arguments.sizes[3];
#pragma unroll 8
        for (index i = threadIdx.x; i < columns; i += blockDim.x) {
            to[i] = from[i];
        }
    }
}

// Reads ids, this rank's rows of the table; writes y, zeros for rows of other ranks.
// sizes: tokens, hidden, this rank's first row, its rows, rows of all ranks
KERNEL(embedding) {
    const int *ids = read<int>(arguments, 0);
    const number *table = read<number>(arguments, 1);
    number *y = written<number>(arguments, 0);
    const index hidden = arguments.sizes[1], first = arguments.sizes[2], rows = arguments.sizes[3];
    for (index token = blockIdx.x; token < arguments.sizes[0]; token += gridDim.x) {
        const bool is_valid = is_within(arguments, ids[token], arguments.sizes[4], token);
        const index row = (index)ids[token] - first;
        const bool is_local = is_valid && row >= 0 && row < rows;
        for (index i = threadIdx.x; i < hidden; i += blockDim.x) {
            if (is_local) {
                y[token * hidden + i] = table[row * hidden + i];
            } else {
                narrow(y[token * hidden + i], 0.0f);
            }
        }
    }
}

// Reads dy, ids; adds to dtable, which the host has cleared unless the call accumulates. One block
// for each token: that of an id's first token sums all its tokens' rows, in order.
// sizes: tokens, hidden, this rank's first row, its rows, rows of all ranks
KERNEL(embedding_gradient) {
    const number *dy = read<number>(arguments, 0);
    const int *ids = read<int>(arguments, 1);
    float *table = written<float>(arguments, 0);
    const index tokens = arguments.sizes[0], hidden = arguments.sizes[1], first = arguments.sizes[2], rows = arguments.sizes[3];
    __shared__ int has_id[256];
    const index token = blockIdx.x;
    const int id = ids[token];
    const bool is_valid = threadIdx.x != 0 || is_within(arguments, id, arguments.sizes[4], token);
    const index row = (index)id - first;
    // All threads must take the same branch, because barriers follow.
    if (__syncthreads_or(!is_valid) || row < 0 || row >= rows) {
        return;
    }
    for (index chunk = 0; chunk < token; chunk += blockDim.x) {
        const index other = chunk + threadIdx.x;
        if (__syncthreads_or(other < token && ids[other] == id)) {
            return;
        }
    }
    for (index from = 0; from < hidden; from += blockDim.x) {
        const index feature = from + threadIdx.x;
        float sum = 0.0f;
        for (index chunk = token; chunk < tokens; chunk += blockDim.x) {
            const index other = chunk + threadIdx.x;
            const int is_same_id = other < tokens && ids[other] == id;
            if (!__syncthreads_or(is_same_id)) {
                continue;
            }
            has_id[threadIdx.x] = is_same_id;
            __syncthreads();
            for (index i = 0; i < (index)blockDim.x; i++) {
                if (has_id[i] && feature < hidden) {
                    sum += widen(dy[(chunk + i) * hidden + feature]);
                }
            }
            __syncthreads();
        }
        if (feature < hidden) {
            table[row * hidden + feature] += sum;
        }
    }
}
