// What only moves numbers, and what looks them up. The host says of a move how the places follow from three counters, and in units of how
// many bytes.

template <typename Unit> __device__ __forceinline__ void move_blocks(const Arguments &arguments) {
    const Unit *from = (const Unit *)arguments.reads[0] + arguments.sizes[9];
    Unit *to = (Unit *)arguments.writes[0] + arguments.sizes[10];
    const index *extents = arguments.sizes, *read_strides = arguments.sizes + 3, *write_strides = arguments.sizes + 6;
    const index elements = extents[0] * extents[1] * extents[2];
    for (index i = this_thread(); i < elements; i += all_threads()) {
        const index inner = i % extents[2], middle = i / extents[2] % extents[1], outer = i / extents[2] / extents[1];
        to[outer * write_strides[0] + middle * write_strides[1] + inner * write_strides[2]] =
            from[outer * read_strides[0] + middle * read_strides[1] + inner * read_strides[2]];
    }
}

// sizes: three extents, three strides of what is read, three of what is written, where reading begins, where writing does
KERNEL(copy_2) { move_blocks<unsigned short>(arguments); }
KERNEL(copy_4) { move_blocks<word>(arguments); }
struct alignas(16) FourWords {
    word words[4];
};
KERNEL(copy_16) { move_blocks<FourWords>(arguments); }

// sizes: rows, numbers of a row, numbers from a row to the next of what is read, and of what is written; a block a row
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

// Reads ids, table; writes y. sizes: tokens, hidden, the first row of the part, its rows, rows of all parts
KERNEL(embedding) {
    const int *ids = read<int>(arguments, 0);
    const number *table = read<number>(arguments, 1);
    number *y = written<number>(arguments, 0);
    const index hidden = arguments.sizes[1], first = arguments.sizes[2], rows = arguments.sizes[3];
    for (index token = blockIdx.x; token < arguments.sizes[0]; token += gridDim.x) {
        const bool is_word = is_within(arguments, ids[token], arguments.sizes[4], token);
        const index own = (index)ids[token] - first;
        const bool is_own = is_word && own >= 0 && own < rows;
        for (index i = threadIdx.x; i < hidden; i += blockDim.x) {
            if (is_own) {
                y[token * hidden + i] = table[own * hidden + i];
            } else {
                narrow(y[token * hidden + i], 0.0f);
            }
        }
    }
}

// Reads dy, ids; adds to dtable, which the host has cleared unless it accumulates. The block of the first token of an id sums the rows of
// all tokens of it, in their order. sizes: tokens, hidden, the first row of the part, its rows, rows of all parts
KERNEL(embedding_gradient) {
    const number *dy = read<number>(arguments, 0);
    const int *ids = read<int>(arguments, 1);
    float *table = written<float>(arguments, 0);
    const index tokens = arguments.sizes[0], hidden = arguments.sizes[1], first = arguments.sizes[2], rows = arguments.sizes[3];
    __shared__ int is_same[256];
    const index token = blockIdx.x;
    const int id = ids[token];
    const bool is_word = threadIdx.x != 0 || is_within(arguments, id, arguments.sizes[4], token);
    const index own = (index)id - first;
    // All threads of a block decide alike: by what is known to all of them.
    if (__syncthreads_or(!is_word) || own < 0 || own >= rows) {
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
            const int same = other < tokens && ids[other] == id;
            if (!__syncthreads_or(same)) {
                continue;
            }
            is_same[threadIdx.x] = same;
            __syncthreads();
            for (index i = 0; i < (index)blockDim.x; i++) {
                if (is_same[i] && feature < hidden) {
                    sum += widen(dy[(chunk + i) * hidden + feature]);
                }
            }
            __syncthreads();
        }
        if (feature < hidden) {
            table[own * hidden + feature] += sum;
        }
    }
}
