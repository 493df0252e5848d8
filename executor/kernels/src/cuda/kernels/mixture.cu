// Routing of tokens to the slots of their experts, and back.

// Chooses each token's `top` experts. Reads logits; writes gates, choices. sizes: tokens, experts,
// top
KERNEL(route) {
    const index tokens = arguments.sizes[0], experts = arguments.sizes[1], top = arguments.sizes[2];
    for (index token = thread_index(); token < tokens; token += thread_count()) {
        const number *logits = read<number>(arguments, 0) + token * experts;
        number *gates = written<number>(arguments, 0) + token * top;
        int *choices = written<int>(arguments, 1) + token * top;
        float highest = 0.0f, sum = 0.0f;
        for (index rank = 0; rank < top; rank++) {
            index best = -1;
            float largest = 0.0f;
            for (index expert = 0; expert < experts; expert++) {
                const float logit = widen(logits[expert]);
                if (best >= 0 && !(logit > largest)) {
                    continue;
                }
                bool is_taken = false;
                for (index before = 0; before < rank; before++) {
                    is_taken |= choices[before] == (int)expert;
                }
                if (!is_taken) {
                    best = expert;
                    largest = logit;
                }
            }
            choices[rank] = best < 0 ? 0 : (int)best;
            highest = rank == 0 ? largest : highest;
            sum += expf(largest - highest);
        }
        for (index rank = 0; rank < top; rank++) {
            narrow(gates[rank], expf(widen(logits[choices[rank]]) - highest) / sum);
        }
    }
}

// Reads dgates, gates, choices; writes dlogits. sizes: tokens, experts, top
KERNEL(route_gradient) {
    const index tokens = arguments.sizes[0], experts = arguments.sizes[1], top = arguments.sizes[2];
    for (index token = thread_index(); token < tokens; token += thread_count()) {
        const number *dgates = read<number>(arguments, 0) + token * top, *gates = read<number>(arguments, 1) + token * top;
        const int *choices = read<int>(arguments, 2) + token * top;
        number *dlogits = written<number>(arguments, 0) + token * experts;
        float mean = 0.0f;
        for (index rank = 0; rank < top; rank++) {
            mean += widen(dgates[rank]) * widen(gates[rank]);
        }
        for (index expert = 0; expert < experts; expert++) {
            narrow(dlogits[expert], 0.0f);
        }
        for (index rank = 0; rank < top; rank++) {
            if (is_within(arguments, choices[rank], experts, token * top + rank)) {
                narrow(dlogits[choices[rank]], widen(gates[rank]) * (widen(dgates[rank]) - mean));
            }
        }
    }
}

// Assigns each choice the next slot of its expert, in the order of the choices; -1 if the expert is
// full. One block for each expert. Reads (x,) choices; writes (dispatched,) slots.
// sizes: choices, experts, capacity; scratch: choices that each expert dropped
KERNEL(dispatch_slots) {
    const int *choices = read<int>(arguments, 1);
    int *slots = written<int>(arguments, 1);
    const index count = arguments.sizes[0], capacity = arguments.sizes[2];
    __shared__ index warp_counts[32];
    const int expert = (int)blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    index filled = 0;
    for (index chunk = 0; chunk < count; chunk += blockDim.x) {
        const index i = chunk + threadIdx.x;
        // The first expert's block reports choices that are out of range.
        const bool is_choice = i < count && (expert != 0 || is_within(arguments, choices[i], arguments.sizes[1], i));
        const bool is_own = is_choice && choices[i] == expert;
        const word own_lanes = __ballot_sync(0xFFFFFFFFu, is_own);
        if (lane == 0) {
            warp_counts[warp] = __popc(own_lanes);
        }
        __syncthreads();
        index slot = filled + __popc(own_lanes & ((1u << lane) - 1u));
        for (int other = 0; other < (int)(blockDim.x / 32); other++) {
            slot += other < warp ? warp_counts[other] : 0;
            filled += warp_counts[other];
        }
        if (is_own) {
            slots[i] = slot < capacity ? (int)slot : -1;
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        ((float *)arguments.scratch)[expert] = filled > capacity ? (float)(filled - capacity) : 0.0f;
    }
}

// Sums the dropped choices: writes the third operand. sizes: experts; one block
KERNEL(dispatch_dropped) {
    double sum = 0.0;
    for (index i = threadIdx.x; i < arguments.sizes[0]; i += blockDim.x) {
        sum += ((const float *)arguments.scratch)[i];
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        store(arguments, written<float>(arguments, 2), (float)sum);
    }
}

// The row of a choice among all experts' slots, or -1 if it was dropped. `operand` is the read of
// the choices; the slots are the next read.
__device__ __forceinline__ index slot_row(const Arguments &arguments, int operand, index choice, index experts, index capacity) {
    const int expert = read<int>(arguments, operand)[choice], slot = read<int>(arguments, operand + 1)[choice];
    if (slot == -1 || !is_within(arguments, expert, experts, choice) || !is_within(arguments, slot, capacity, choice)) {
        return -1;
    }
    return (index)expert * capacity + slot;
}

// Copies each token to the slots of its choices. Reads x, choices, and the slots, which are the
// second write; writes dispatched, which the host has cleared. One block for each choice.
// sizes: choices, experts, capacity, top, hidden
KERNEL(dispatch_rows) {
    const index top = arguments.sizes[3], hidden = arguments.sizes[4];
    for (index choice = blockIdx.x; choice < arguments.sizes[0]; choice += gridDim.x) {
        const int expert = read<int>(arguments, 1)[choice];
        if (expert < 0 || expert >= arguments.sizes[1]) {
            continue;
        }
        const int slot = written<int>(arguments, 1)[choice];
        const number *from = read<number>(arguments, 0) + choice / top * hidden;
        number *to = written<number>(arguments, 0) + ((index)expert * arguments.sizes[2] + slot) * hidden;
        for (index i = threadIdx.x; slot >= 0 && i < hidden; i += blockDim.x) {
            to[i] = from[i];
        }
    }
}

// Sums the rows of each token's slots, weighted by gates if there are any. Reads rows (, gates),
// choices, slots; writes one row for each token. One block for each token.
// sizes: tokens, experts, capacity, top, hidden, whether there are gates
KERNEL(gather_slots) {
    const index top = arguments.sizes[3], hidden = arguments.sizes[4];
    const bool has_gates = arguments.sizes[5] != 0;
    const number *rows = read<number>(arguments, 0), *gates = read<number>(arguments, 1);
    for (index token = blockIdx.x; token < arguments.sizes[0]; token += gridDim.x) {
        for (index i = threadIdx.x; i < hidden; i += blockDim.x) {
            float sum = 0.0f;
            for (index choice = token * top; choice < (token + 1) * top; choice++) {
                const index from = slot_row(arguments, has_gates ? 2 : 1, choice, arguments.sizes[1], arguments.sizes[2]);
                if (from >= 0) {
                    sum += (has_gates ? widen(gates[choice]) : 1.0f) * widen(rows[from * hidden + i]);
                }
            }
            narrow(written<number>(arguments, 0)[token * hidden + i], sum);
        }
    }
}

// Reads dy, gates, choices, slots; writes drows, which the host has cleared. One block for each
// choice.
// sizes: choices, experts, capacity, top, hidden
KERNEL(combine_input_gradient) {
    const index hidden = arguments.sizes[4];
    for (index choice = blockIdx.x; choice < arguments.sizes[0]; choice += gridDim.x) {
        const index to = slot_row(arguments, 2, choice, arguments.sizes[1], arguments.sizes[2]);
        const number *dy = read<number>(arguments, 0) + choice / arguments.sizes[3] * hidden;
        const float gate = widen(read<number>(arguments, 1)[choice]);
        for (index i = threadIdx.x; to >= 0 && i < hidden; i += blockDim.x) {
            narrow(written<number>(arguments, 0)[to * hidden + i], gate * widen(dy[i]));
        }
    }
}

// Reads dy, rows, choices, slots; writes dgates. One block for each choice.
// sizes: as for combine_input_gradient
KERNEL(combine_gate_gradient) {
    const index hidden = arguments.sizes[4];
    for (index choice = blockIdx.x; choice < arguments.sizes[0]; choice += gridDim.x) {
        const index from = slot_row(arguments, 2, choice, arguments.sizes[1], arguments.sizes[2]);
        const number *dy = read<number>(arguments, 0) + choice / arguments.sizes[3] * hidden;
        float sum = 0.0f;
        for (index i = threadIdx.x; from >= 0 && i < hidden; i += blockDim.x) {
            sum += widen(dy[i]) * widen(read<number>(arguments, 1)[from * hidden + i]);
        }
        sum = block_sum(sum);
        if (threadIdx.x == 0) {
            narrow(written<number>(arguments, 0)[choice], sum);
        }
    }
}
