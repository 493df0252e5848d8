// The way of tokens to the slots of their experts and back.

// Reads logits; writes gates, choices. sizes: tokens, experts, top
KERNEL(route) {
    const index tokens = arguments.sizes[0], experts = arguments.sizes[1], top = arguments.sizes[2];
    for (index token = this_thread(); token < tokens; token += all_threads()) {
        const number *logits = read<number>(arguments, 0) + token * experts;
        number *gates = written<number>(arguments, 0) + token * top;
        int *choices = written<int>(arguments, 1) + token * top;
        float highest = 0.0f, sum = 0.0f;
        for (index place = 0; place < top; place++) {
            index best = -1;
            float most = 0.0f;
            for (index expert = 0; expert < experts; expert++) {
                const float logit = widen(logits[expert]);
                if (best >= 0 && !(logit > most)) {
                    continue;
                }
                bool is_taken = false;
                for (index before = 0; before < place; before++) {
                    is_taken |= choices[before] == (int)expert;
                }
                if (!is_taken) {
                    best = expert;
                    most = logit;
                }
            }
            choices[place] = best < 0 ? 0 : (int)best;
            highest = place == 0 ? most : highest;
            sum += expf(most - highest);
        }
        for (index place = 0; place < top; place++) {
            narrow(gates[place], expf(widen(logits[choices[place]]) - highest) / sum);
        }
    }
}

// Reads dgates, gates, choices; writes dlogits. sizes: tokens, experts, top
KERNEL(route_gradient) {
    const index tokens = arguments.sizes[0], experts = arguments.sizes[1], top = arguments.sizes[2];
    for (index token = this_thread(); token < tokens; token += all_threads()) {
        const number *dgates = read<number>(arguments, 0) + token * top, *gates = read<number>(arguments, 1) + token * top;
        const int *choices = read<int>(arguments, 2) + token * top;
        number *dlogits = written<number>(arguments, 0) + token * experts;
        float mean = 0.0f;
        for (index place = 0; place < top; place++) {
            mean += widen(dgates[place]) * widen(gates[place]);
        }
        for (index expert = 0; expert < experts; expert++) {
            narrow(dlogits[expert], 0.0f);
        }
        for (index place = 0; place < top; place++) {
            if (is_within(arguments, choices[place], experts, token * top + place)) {
                narrow(dlogits[choices[place]], widen(gates[place]) * (widen(dgates[place]) - mean));
            }
        }
    }
}

// The slot of each choice, in the order of the choices: a block an expert. Reads (x,) choices; writes (dispatched,) places; scratch: how
// many an expert dropped. sizes: choices, experts, capacity
KERNEL(dispatch_slots) {
    const int *choices = read<int>(arguments, 1);
    int *places = written<int>(arguments, 1);
    const index count = arguments.sizes[0], capacity = arguments.sizes[2];
    __shared__ index of_warps[32];
    const int expert = (int)blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    index filled = 0;
    for (index chunk = 0; chunk < count; chunk += blockDim.x) {
        const index i = chunk + threadIdx.x;
        // The first expert's block looks after those that are none.
        const bool is_choice = i < count && (expert != 0 || is_within(arguments, choices[i], arguments.sizes[1], i));
        const bool is_own = is_choice && choices[i] == expert;
        const word same = __ballot_sync(0xFFFFFFFFu, is_own);
        if (lane == 0) {
            of_warps[warp] = __popc(same);
        }
        __syncthreads();
        index place = filled + __popc(same & ((1u << lane) - 1u));
        for (int other = 0; other < (int)(blockDim.x / 32); other++) {
            place += other < warp ? of_warps[other] : 0;
            filled += of_warps[other];
        }
        if (is_own) {
            places[i] = place < capacity ? (int)place : -1;
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        ((float *)arguments.scratch)[expert] = filled > capacity ? (float)(filled - capacity) : 0.0f;
    }
}

// sizes: experts; one block
KERNEL(dispatch_dropped) {
    double sum = 0.0;
    for (index i = threadIdx.x; i < arguments.sizes[0]; i += blockDim.x) {
        sum += ((const float *)arguments.scratch)[i];
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        put(arguments, written<float>(arguments, 2), (float)sum);
    }
}

// The slot of a choice, or none (below zero). `where`: the read of the choices; the places follow it.
__device__ __forceinline__ index slot(const Arguments &arguments, int where, index choice, index experts, index capacity) {
    const int expert = read<int>(arguments, where)[choice], place = read<int>(arguments, where + 1)[choice];
    if (place == -1 || !is_within(arguments, expert, experts, choice) || !is_within(arguments, place, capacity, choice)) {
        return -1;
    }
    return (index)expert * capacity + place;
}

// Reads x, choices; writes dispatched, which the host has cleared; its places are the second write. sizes: choices, experts, capacity,
// top, hidden; a block a choice
KERNEL(dispatch_rows) {
    const index top = arguments.sizes[3], hidden = arguments.sizes[4];
    for (index choice = blockIdx.x; choice < arguments.sizes[0]; choice += gridDim.x) {
        const int expert = read<int>(arguments, 1)[choice];
        if (expert < 0 || expert >= arguments.sizes[1]) {
            continue;
        }
        const int place = written<int>(arguments, 1)[choice];
        const number *from = read<number>(arguments, 0) + choice / top * hidden;
        number *to = written<number>(arguments, 0) + ((index)expert * arguments.sizes[2] + place) * hidden;
        for (index i = threadIdx.x; place >= 0 && i < hidden; i += blockDim.x) {
            to[i] = from[i];
        }
    }
}

// Reads rows (, gates), choices, places; writes for each token the sum of its slots' rows. sizes: tokens, experts, capacity, top, hidden,
// whether there are gates; a block a token
KERNEL(gather_slots) {
    const index top = arguments.sizes[3], hidden = arguments.sizes[4];
    const bool has_gates = arguments.sizes[5] != 0;
    const number *rows = read<number>(arguments, 0), *gates = read<number>(arguments, 1);
    for (index token = blockIdx.x; token < arguments.sizes[0]; token += gridDim.x) {
        for (index i = threadIdx.x; i < hidden; i += blockDim.x) {
            float sum = 0.0f;
            for (index choice = token * top; choice < (token + 1) * top; choice++) {
                const index from = slot(arguments, has_gates ? 2 : 1, choice, arguments.sizes[1], arguments.sizes[2]);
                if (from >= 0) {
                    sum += (has_gates ? widen(gates[choice]) : 1.0f) * widen(rows[from * hidden + i]);
                }
            }
            narrow(written<number>(arguments, 0)[token * hidden + i], sum);
        }
    }
}

// Reads dy, gates, choices, places; writes drows, which the host has cleared. sizes: choices, experts, capacity, top, hidden
KERNEL(combine_input_gradient) {
    const index hidden = arguments.sizes[4];
    for (index choice = blockIdx.x; choice < arguments.sizes[0]; choice += gridDim.x) {
        const index to = slot(arguments, 2, choice, arguments.sizes[1], arguments.sizes[2]);
        const number *dy = read<number>(arguments, 0) + choice / arguments.sizes[3] * hidden;
        const float gate = widen(read<number>(arguments, 1)[choice]);
        for (index i = threadIdx.x; to >= 0 && i < hidden; i += blockDim.x) {
            narrow(written<number>(arguments, 0)[to * hidden + i], gate * widen(dy[i]));
        }
    }
}

// Reads dy, rows, choices, places; writes dgates. sizes as above; a block a choice
KERNEL(combine_gate_gradient) {
    const index hidden = arguments.sizes[4];
    for (index choice = blockIdx.x; choice < arguments.sizes[0]; choice += gridDim.x) {
        const index from = slot(arguments, 2, choice, arguments.sizes[1], arguments.sizes[2]);
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
