// Softmax cross-entropy, also of a vocabulary that is sharded over ranks. One block for each row.

// The maximum of a row, its first position, and the sum of exponentials relative to it.
struct RowSummary {
    float largest;
    index position;
    float sum;
};

// Logits of a row that a thread loads at a time. A row of a vocabulary is seldom aligned, so each
// is a memory access of its own.
enum { AT_ONCE = 8 };
__device__ __forceinline__ void load_logits(float (&x)[AT_ONCE], const number *row, index start, index classes) {
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++) {
        const index i = start + n * blockDim.x;
        x[n] = i < classes ? widen(row[i]) : -INFINITY;
    }
}

__device__ __forceinline__ RowSummary merged(RowSummary a, RowSummary b) {
    const bool a_first = a.largest > b.largest || (a.largest == b.largest && a.position <= b.position);
    const RowSummary first = a_first ? a : b, second = a_first ? b : a;
    // Two empty summaries are both minus infinity, and their difference would be NaN.
    const float rescaled = second.sum == 0.0f ? 0.0f : second.sum * expf(second.largest - first.largest);
    return RowSummary{first.largest, first.position, first.sum + rescaled};
}

// The summary of a row; every thread of the block gets it.
__device__ RowSummary summarise(const number *row, index classes) {
    __shared__ float largests[32], sums[32];
    __shared__ index positions[32];
    RowSummary own = {-INFINITY, classes, 0.0f};
    for (index start = threadIdx.x; start < classes; start += AT_ONCE * blockDim.x) {
        float x[AT_ONCE];
        load_logits(x, row, start, classes);
        RowSummary some = {-INFINITY, classes, 0.0f};
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            const index i = start + n * blockDim.x;
            if (i < classes && (x[n] > some.largest || some.position == classes)) {
                some.largest = x[n];
                some.position = i;
            }
        }
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            some.sum += start + n * blockDim.x < classes ? expf(x[n] - some.largest) : 0.0f;
        }
        own = merged(own, some);
    }
    for (int distance = 16; distance > 0; distance /= 2) {
        RowSummary other;
        other.largest = __shfl_xor_sync(0xFFFFFFFFu, own.largest, distance);
        other.position = __shfl_xor_sync(0xFFFFFFFFu, own.position, distance);
        other.sum = __shfl_xor_sync(0xFFFFFFFFu, own.sum, distance);
        own = merged(own, other);
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        largests[threadIdx.x / 32] = own.largest;
        positions[threadIdx.x / 32] = own.position;
        sums[threadIdx.x / 32] = own.sum;
    }
    __syncthreads();
    RowSummary whole = {largests[0], positions[0], sums[0]};
    for (unsigned warp = 1; warp < blockDim.x / 32; warp++) {
        whole = merged(whole, RowSummary{largests[warp], positions[warp], sums[warp]});
    }
    return whole;
}

// Reads logits, labels; writes (loss, correct,) log-sum-exp. A label of -1 does not count.
// sizes: rows, classes; scratch: each row's loss, and 1 if its label has the largest logit
KERNEL(cross_entropy_rows) {
    const index rows = arguments.sizes[0], classes = arguments.sizes[1];
    float *row_results = (float *)arguments.scratch, *log_sums = written<float>(arguments, 2);
    for (index row = blockIdx.x; row < rows; row += gridDim.x) {
        const number *logits = read<number>(arguments, 0) + row * classes;
        const int label = read<int>(arguments, 1)[row];
        const RowSummary summary = summarise(logits, classes);
        if (threadIdx.x == 0) {
            const float log_sum = summary.largest + logf(summary.sum);
            const bool counts = label != -1 && is_within(arguments, label, classes, row);
            log_sums[row] = counts ? log_sum : 0.0f;
            row_results[2 * row] = counts ? log_sum - widen(logits[label]) : 0.0f;
            row_results[2 * row + 1] = counts && summary.position == label ? 1.0f : 0.0f;
        }
    }
}

// Sums the rows' losses and correct labels: writes loss, correct. sizes: rows; one block
KERNEL(cross_entropy_sums) {
    const float *row_results = (const float *)arguments.scratch;
    double losses = 0.0, correct = 0.0;
    for (index row = threadIdx.x; row < arguments.sizes[0]; row += blockDim.x) {
        losses += row_results[2 * row];
        correct += row_results[2 * row + 1];
    }
    losses = block_sum(losses);
    correct = block_sum(correct);
    if (threadIdx.x == 0) {
        store(arguments, written<float>(arguments, 0), (float)losses);
        store(arguments, written<float>(arguments, 1), (float)correct);
    }
}

// Reads logits of this rank's classes, labels; writes statistics [rows, 4]: maximum, sum of
// exponentials relative to it, the label's logit (-infinity if another rank has it), and 1 if that
// is the maximum. sizes: rows, classes, this rank's first class, classes of all ranks
KERNEL(logit_statistics) {
    const index rows = arguments.sizes[0], classes = arguments.sizes[1], first = arguments.sizes[2];
    for (index row = blockIdx.x; row < rows; row += gridDim.x) {
        const number *logits = read<number>(arguments, 0) + row * classes;
        const int label = read<int>(arguments, 1)[row];
        const RowSummary summary = summarise(logits, classes);
        if (threadIdx.x == 0) {
            const bool is_class = label != -1 && is_within(arguments, label, arguments.sizes[3], row);
            const index own = (index)label - first;
            const bool is_own = is_class && own >= 0 && own < classes;
            float *statistics = written<float>(arguments, 0) + 4 * row;
            statistics[0] = summary.largest;
            statistics[1] = summary.sum;
            statistics[2] = is_own ? widen(logits[own]) : -INFINITY;
            statistics[3] = is_own && summary.position == own ? 1.0f : 0.0f;
        }
    }
}

// Reads statistics [parts, rows, 4], labels; writes (loss, correct,) log-sum-exp. sizes: rows,
// parts;
// scratch: as for cross_entropy_rows
KERNEL(cross_entropy_of_statistics) {
    const index rows = arguments.sizes[0], parts = arguments.sizes[1];
    const float *statistics = read<float>(arguments, 0);
    const int *labels = read<int>(arguments, 1);
    float *row_results = (float *)arguments.scratch;
    for (index row = thread_index(); row < rows; row += thread_count()) {
        float largest = -INFINITY, logit = -INFINITY, sum = 0.0f, is_right = 0.0f;
        for (index part = 0; part < parts; part++) {
            const float *part_statistics = statistics + 4 * (part * rows + row);
            if (part_statistics[0] > largest) {
                largest = part_statistics[0];
                is_right = part_statistics[3];
            }
            logit = fmaxf(logit, part_statistics[2]);
        }
        for (index part = 0; part < parts; part++) {
            const float *part_statistics = statistics + 4 * (part * rows + row);
            sum += part_statistics[1] * expf(part_statistics[0] - largest);
        }
        const bool counts = labels[row] != -1;
        const float log_sum = largest + logf(sum);
        written<float>(arguments, 2)[row] = counts ? log_sum : 0.0f;
        row_results[2 * row] = counts ? log_sum - logit : 0.0f;
        row_results[2 * row + 1] = counts ? is_right : 0.0f;
    }
}

// Reads logits, labels, log-sum-exp (, control); writes dlogits, which may be the logits.
// sizes: rows, classes, this rank's first class, classes of all ranks, whether the loss is scaled
// numbers: normalizer
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
        // The loads come before the stores, because dlogits may be the logits.
        for (index start = threadIdx.x; start < classes; start += AT_ONCE * blockDim.x) {
            float x[AT_ONCE];
            load_logits(x, logits, start, classes);
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

// Cross-entropy against targets weight · (kept [class = label] + spread): reads logits, labels,
// weights; writes (loss, correct,) log-sum-exp. sizes: rows, classes; numbers: kept, spread;
// scratch: each row's loss, 1 if its label has the largest logit, and the label's weight
KERNEL(weighted_cross_entropy_rows) {
    const index rows = arguments.sizes[0], classes = arguments.sizes[1];
    const float kept = arguments.numbers[0], spread = arguments.numbers[1];
    float *row_results = (float *)arguments.scratch, *log_sums = written<float>(arguments, 2);
    const float *weights = read<float>(arguments, 2);
    for (index row = blockIdx.x; row < rows; row += gridDim.x) {
        const number *logits = read<number>(arguments, 0) + row * classes;
        const int label = read<int>(arguments, 1)[row];
        const RowSummary summary = summarise(logits, classes);
        const float log_sum = summary.largest + logf(summary.sum);
        double losses = 0.0;
        if (spread != 0.0f) {
            for (index i = threadIdx.x; i < classes; i += blockDim.x) {
                losses += weights[i] != 0.0f ? (double)weights[i] * (double)(log_sum - widen(logits[i])) : 0.0;
            }
            losses = block_sum(losses);
        }
        if (threadIdx.x == 0) {
            const bool counts = label != -1 && is_within(arguments, label, classes, row);
            const float weight = counts ? weights[label] : 0.0f;
            log_sums[row] = counts ? log_sum : 0.0f;
            row_results[3 * row] = counts ? kept * weight * (log_sum - widen(logits[label])) + spread * (float)losses : 0.0f;
            row_results[3 * row + 1] = counts && summary.position == label ? 1.0f : 0.0f;
            row_results[3 * row + 2] = weight;
        }
    }
}

// Sums what each row has: writes loss, correct, (log-sum-exp,) weight. sizes: rows; one block
KERNEL(weighted_cross_entropy_sums) {
    const float *row_results = (const float *)arguments.scratch;
    double sums[3] = {0.0, 0.0, 0.0};
    for (index row = threadIdx.x; row < arguments.sizes[0]; row += blockDim.x) {
        for (int n = 0; n < 3; n++) {
            sums[n] += row_results[3 * row + n];
        }
    }
    const int operands[3] = {0, 1, 3};
    for (int n = 0; n < 3; n++) {
        const double sum = block_sum(sums[n]);
        if (threadIdx.x == 0) {
            store(arguments, written<float>(arguments, operands[n]), (float)sum);
        }
    }
}

// Reads logits, labels, log-sum-exp, weights (, control); writes dlogits, which may be the logits.
// sizes: rows, classes, whether the loss is scaled; numbers: kept, spread, normalizer
KERNEL(weighted_cross_entropy_gradient) {
    const index rows = arguments.sizes[0], classes = arguments.sizes[1];
    const float kept = arguments.numbers[0], spread = arguments.numbers[1];
    const float loss_scale = arguments.sizes[2] != 0 ? read<float>(arguments, 4)[0] : 1.0f;
    const float factor = loss_scale / arguments.numbers[2];
    const float *weights = read<float>(arguments, 3);
    double all = 0.0;
    if (spread != 0.0f) {
        for (index i = threadIdx.x; i < classes; i += blockDim.x) {
            all += weights[i];
        }
        all = block_sum(all);
    }
    const float weight_of_all = (float)all;
    for (index row = blockIdx.x; row < rows; row += gridDim.x) {
        const number *logits = read<number>(arguments, 0) + row * classes;
        number *dlogits = written<number>(arguments, 0) + row * classes;
        const int label = read<int>(arguments, 1)[row];
        const float log_sum = read<float>(arguments, 2)[row];
        // Every thread needs the label's weight, so none may read beyond the weights.
        const bool is_class = label >= 0 && label < classes;
        const bool counts = label != -1 && (threadIdx.x != 0 || is_within(arguments, label, classes, row)) && is_class;
        const float of_label = is_class ? kept * weights[label] : 0.0f;
        const float sum = (of_label + spread * weight_of_all) * factor;
        // The loads come before the stores, because dlogits may be the logits.
        for (index start = threadIdx.x; start < classes; start += AT_ONCE * blockDim.x) {
            float x[AT_ONCE];
            load_logits(x, logits, start, classes);
#pragma unroll
            for (int n = 0; n < AT_ONCE; n++) {
                const index i = start + n * blockDim.x;
                if (i < classes) {
                    const float target = (i == label ? of_label : 0.0f) + spread * weights[i];
                    narrow(dlogits[i], counts ? sum * expf(x[n] - log_sum) - target * factor : 0.0f);
                }
            }
        }
    }
}

// Reads logits of this rank's classes, labels (, statistics [parts, rows, 4] of all classes);
// writes the number of these classes that come before the label's. sizes: rows, classes, this
// rank's first class, classes of all ranks, parts
KERNEL(label_ranks) {
    const index rows = arguments.sizes[0], classes = arguments.sizes[1], first = arguments.sizes[2], parts = arguments.sizes[4];
    for (index row = blockIdx.x; row < rows; row += gridDim.x) {
        const number *logits = read<number>(arguments, 0) + row * classes;
        const int label = read<int>(arguments, 1)[row];
        const bool is_class = label >= 0 && label < arguments.sizes[3];
        if (threadIdx.x == 0 && label != -1) {
            is_within(arguments, label, arguments.sizes[3], row);
        }
        float logit = -INFINITY;
        if (parts > 1) {
            for (index part = 0; part < parts; part++) {
                logit = fmaxf(logit, read<float>(arguments, 2)[4 * (part * rows + row) + 2]);
            }
        } else if (is_class) {
            logit = widen(logits[label]);
        }
        float before = 0.0f;
        for (index i = threadIdx.x; is_class && i < classes; i += blockDim.x) {
            const float other = widen(logits[i]);
            before += other > logit || (other == logit && first + i < label) ? 1.0f : 0.0f;
        }
        before = block_sum(before);
        if (threadIdx.x == 0) {
            written<float>(arguments, 0)[row] = before;
        }
    }
}

// Reads ranks, labels; writes the number of labels among the best classes. sizes: rows, how many
// classes are the best; one block
KERNEL(top_labels) {
    float count = 0.0f;
    for (index row = threadIdx.x; row < arguments.sizes[0]; row += blockDim.x) {
        const bool is_top = read<float>(arguments, 0)[row] < (float)arguments.sizes[1];
        count += read<int>(arguments, 1)[row] != -1 && is_top ? 1.0f : 0.0f;
    }
    count = block_sum(count);
    if (threadIdx.x == 0) {
        store(arguments, written<float>(arguments, 0), count);
    }
}

// Reads logits, labels, log-sum-exp; writes each row's probabilities and label. sizes: rows,
// classes
KERNEL(class_scores) {
    const index rows = arguments.sizes[0], classes = arguments.sizes[1];
    for (index row = blockIdx.x; row < rows; row += gridDim.x) {
        const number *logits = read<number>(arguments, 0) + row * classes;
        const int label = read<int>(arguments, 1)[row];
        float *scores = written<float>(arguments, 0) + row * (classes + 1);
        const float log_sum = read<float>(arguments, 2)[row];
        for (index i = threadIdx.x; i < classes; i += blockDim.x) {
            scores[i] = expf(widen(logits[i]) - log_sum);
        }
        if (threadIdx.x == 0) {
            if (label != -1) {
                is_within(arguments, label, classes, row);
            }
            scores[classes] = (float)label;
        }
    }
}
