// Softmax cross-entropy and what goes with a vocabulary that ranks have cut: a block a row.

// The largest of a row, its first place, and the sum of exponentials relative to it; known to each thread of the block.
struct RowSummary {
    float largest;
    index place;
    float sum;
};

// Numbers of a row that a thread has on their way at a time: rows of a vocabulary are seldom aligned, so that each is an access of its own.
enum { AT_ONCE = 8 };
__device__ __forceinline__ void take(float (&x)[AT_ONCE], const number *row, index start, index classes) {
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++) {
        const index i = start + n * blockDim.x;
        x[n] = i < classes ? widen(row[i]) : -INFINITY;
    }
}

__device__ __forceinline__ RowSummary merged(RowSummary a, RowSummary b) {
    const bool a_first = a.largest > b.largest || (a.largest == b.largest && a.place <= b.place);
    const RowSummary first = a_first ? a : b, second = a_first ? b : a;
    // Nothing at all is minus infinity twice, whose difference is no number.
    const float less = second.sum == 0.0f ? 0.0f : second.sum * expf(second.largest - first.largest);
    return RowSummary{first.largest, first.place, first.sum + less};
}

__device__ RowSummary summarised(const number *row, index classes) {
    __shared__ float largests[32], sums[32];
    __shared__ index places[32];
    RowSummary own = {-INFINITY, classes, 0.0f};
    for (index start = threadIdx.x; start < classes; start += AT_ONCE * blockDim.x) {
        float x[AT_ONCE];
        take(x, row, start, classes);
        RowSummary some = {-INFINITY, classes, 0.0f};
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            const index i = start + n * blockDim.x;
            if (i < classes && (x[n] > some.largest || some.place == classes)) {
                some.largest = x[n];
                some.place = i;
            }
        }
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            some.sum += start + n * blockDim.x < classes ? expf(x[n] - some.largest) : 0.0f;
        }
        own = merged(own, some);
    }
    for (int apart = 16; apart > 0; apart /= 2) {
        RowSummary other;
        other.largest = __shfl_xor_sync(0xFFFFFFFFu, own.largest, apart);
        other.place = __shfl_xor_sync(0xFFFFFFFFu, own.place, apart);
        other.sum = __shfl_xor_sync(0xFFFFFFFFu, own.sum, apart);
        own = merged(own, other);
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        largests[threadIdx.x / 32] = own.largest;
        places[threadIdx.x / 32] = own.place;
        sums[threadIdx.x / 32] = own.sum;
    }
    __syncthreads();
    RowSummary whole = {largests[0], places[0], sums[0]};
    for (unsigned warp = 1; warp < blockDim.x / 32; warp++) {
        whole = merged(whole, RowSummary{largests[warp], places[warp], sums[warp]});
    }
    return whole;
}

// Reads logits, labels; writes (loss, correct,) log-sum-exp. sizes: rows, classes; scratch: a row's loss and whether it is right
KERNEL(cross_entropy_rows) {
    const index rows = arguments.sizes[0], classes = arguments.sizes[1];
    float *of_rows = (float *)arguments.scratch, *log_sums = written<float>(arguments, 2);
    for (index row = blockIdx.x; row < rows; row += gridDim.x) {
        const number *logits = read<number>(arguments, 0) + row * classes;
        const int label = read<int>(arguments, 1)[row];
        const RowSummary summary = summarised(logits, classes);
        if (threadIdx.x == 0) {
            const float log_sum = summary.largest + logf(summary.sum);
            const bool counts = label != -1 && is_within(arguments, label, classes, row);
            log_sums[row] = counts ? log_sum : 0.0f;
            of_rows[2 * row] = counts ? log_sum - widen(logits[label]) : 0.0f;
            of_rows[2 * row + 1] = counts && summary.place == label ? 1.0f : 0.0f;
        }
    }
}

// Writes loss, correct. sizes: rows; one block
KERNEL(cross_entropy_sums) {
    const float *of_rows = (const float *)arguments.scratch;
    double losses = 0.0, hits = 0.0;
    for (index row = threadIdx.x; row < arguments.sizes[0]; row += blockDim.x) {
        losses += of_rows[2 * row];
        hits += of_rows[2 * row + 1];
    }
    losses = block_sum(losses);
    hits = block_sum(hits);
    if (threadIdx.x == 0) {
        put(arguments, written<float>(arguments, 0), (float)losses);
        put(arguments, written<float>(arguments, 1), (float)hits);
    }
}

// Reads logits, labels; writes statistics [rows, 4]. sizes: rows, classes, the first class of the part, classes of all parts
KERNEL(logit_statistics) {
    const index rows = arguments.sizes[0], classes = arguments.sizes[1], first = arguments.sizes[2];
    for (index row = blockIdx.x; row < rows; row += gridDim.x) {
        const number *logits = read<number>(arguments, 0) + row * classes;
        const int label = read<int>(arguments, 1)[row];
        const RowSummary summary = summarised(logits, classes);
        if (threadIdx.x == 0) {
            const bool is_class = label != -1 && is_within(arguments, label, arguments.sizes[3], row);
            const index own = (index)label - first;
            const bool is_own = is_class && own >= 0 && own < classes;
            float *statistics = written<float>(arguments, 0) + 4 * row;
            statistics[0] = summary.largest;
            statistics[1] = summary.sum;
            statistics[2] = is_own ? widen(logits[own]) : -INFINITY;
            statistics[3] = is_own && summary.place == own ? 1.0f : 0.0f;
        }
    }
}

// Reads statistics [parts, rows, 4], labels; writes (loss, correct,) log-sum-exp. sizes: rows, parts; scratch as above
KERNEL(cross_entropy_of_statistics) {
    const index rows = arguments.sizes[0], parts = arguments.sizes[1];
    const float *statistics = read<float>(arguments, 0);
    const int *labels = read<int>(arguments, 1);
    float *of_rows = (float *)arguments.scratch;
    for (index row = this_thread(); row < rows; row += all_threads()) {
        float largest = -INFINITY, logit = -INFINITY, sum = 0.0f, is_right = 0.0f;
        for (index part = 0; part < parts; part++) {
            const float *of_part = statistics + 4 * (part * rows + row);
            if (of_part[0] > largest) {
                largest = of_part[0];
                is_right = of_part[3];
            }
            logit = fmaxf(logit, of_part[2]);
        }
        for (index part = 0; part < parts; part++) {
            const float *of_part = statistics + 4 * (part * rows + row);
            sum += of_part[1] * expf(of_part[0] - largest);
        }
        const bool counts = labels[row] != -1;
        const float log_sum = largest + logf(sum);
        written<float>(arguments, 2)[row] = counts ? log_sum : 0.0f;
        of_rows[2 * row] = counts ? log_sum - logit : 0.0f;
        of_rows[2 * row + 1] = counts ? is_right : 0.0f;
    }
}

// Reads logits, labels, log-sum-exp (, control); writes dlogits, which may be the logits. sizes: rows, classes, the first class of the
// part, classes of all parts, whether scaled; numbers: normalizer
KERNEL(cross_entropy_gradient) {
    const index rows = arguments.sizes[0], classes = arguments.sizes[1], first = arguments.sizes[2];
    const float loss_scale = arguments.sizes[4] != 0 ? read<float>(arguments, 3)[0] : 1.0f;
    const float factor = loss_scale / arguments.numbers[0];
    for (index row = blockIdx.x; row < rows; row += gridDim.x) {
        const number *logits = read<number>(arguments, 0) + row * classes;
        number *dlogits = written<number>(arguments, 0) + row * classes;
        const int label = read<int>(arguments, 1)[row];
        const float log_sum = read<float>(arguments, 2)[row];
        const bool counts = label != -1 && (threadIdx.x != 0 || is_within(arguments, label, arguments.sizes[3], row));
        // What is read is read before anything is written, as it may be the same.
        for (index start = threadIdx.x; start < classes; start += AT_ONCE * blockDim.x) {
            float x[AT_ONCE];
            take(x, logits, start, classes);
#pragma unroll
            for (int n = 0; n < AT_ONCE; n++) {
                const index i = start + n * blockDim.x;
                if (i < classes) {
                    const float target = first + i == label ? factor : 0.0f;
                    narrow(dlogits[i], counts ? factor * expf(x[n] - log_sum) - target : 0.0f);
                }
            }
        }
    }
}
