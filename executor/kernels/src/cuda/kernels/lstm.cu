// LSTM layers. Forward is one launch for each position, with one warp for each element of the
// state; the gradient is two launches for each position. The state between positions stays in
// scratch memory, in single precision.

__device__ __forceinline__ float lstm_sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// One position forward. Reads projected, w (, state); writes y, gates, cells, and after the last
// position the last state.
// sizes: batch, sequence, hidden, position, whether an initial state is given
// scratch: outputs of even positions [batch, hidden], of odd positions, then cells [batch, hidden]
KERNEL(lstm_position) {
    const index batch = arguments.sizes[0], sequence = arguments.sizes[1], hidden = arguments.sizes[2], position = arguments.sizes[3];
    const number *projected = read<number>(arguments, 0), *w = read<number>(arguments, 1);
    float *states = (float *)arguments.scratch, *carried_cells = states + 2 * batch * hidden;
    const float *previous_outputs = states + (position + 1) % 2 * batch * hidden;
    float *outputs = states + position % 2 * batch * hidden;
    const bool is_first = position == 0, is_given = arguments.sizes[4] != 0;
    const int lane = threadIdx.x % 32;
    for (index i = thread_index() / 32; i < batch * hidden; i += thread_count() / 32) {
        const index image = i / hidden, unit = i % hidden, row = image * sequence + position;
        const number *given = read<number>(arguments, 2) + 2 * image * hidden;
        float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (!is_first || is_given) {
            for (index k = lane; k < hidden; k += 32) {
                const float h = is_first ? widen(given[k]) : previous_outputs[image * hidden + k];
                for (int gate = 0; gate < 4; gate++) {
                    sums[gate] += widen(w[(gate * hidden + unit) * hidden + k]) * h;
                }
            }
        }
        for (int gate = 0; gate < 4; gate++) {
            sums[gate] = warp_sum(sums[gate]) + widen(projected[(row * 4 + gate) * hidden + unit]);
        }
        if (lane == 0) {
            const float in = lstm_sigmoid(sums[0]), forget = lstm_sigmoid(sums[1]), candidate = tanhf(sums[2]), out = lstm_sigmoid(sums[3]);
            const float previous = is_first ? (is_given ? widen(given[hidden + unit]) : 0.0f) : carried_cells[i];
            const float cell = forget * previous + in * candidate, y = out * tanhf(cell);
            number *gates = written<number>(arguments, 1) + row * 4 * hidden + unit;
            narrow(gates[0], in);
            narrow(gates[hidden], forget);
            narrow(gates[2 * hidden], candidate);
            narrow(gates[3 * hidden], out);
            narrow(written<number>(arguments, 2)[row * hidden + unit], cell);
            narrow(written<number>(arguments, 0)[row * hidden + unit], y);
            carried_cells[i] = cell;
            outputs[i] = y;
            if (position + 1 == sequence) {
                narrow(written<number>(arguments, 3)[2 * image * hidden + unit], y);
                narrow(written<number>(arguments, 3)[(2 * image + 1) * hidden + unit], cell);
            }
        }
    }
}

// The gradients of one position's gates. Reads (dy,) (dlast,) w, gates, cells (, state); writes
// dprojected.
// sizes: batch, sequence, hidden, position, then which reads dy, dlast, gates, cells and state are
// (-1 if the call has no such read)
// scratch: gradients of the output and the cell [batch, hidden], and of the gates [batch, 4,
// hidden]
KERNEL(lstm_position_gradient) {
    const index batch = arguments.sizes[0], sequence = arguments.sizes[1], hidden = arguments.sizes[2], position = arguments.sizes[3];
    float *douts = (float *)arguments.scratch, *dcells = douts + batch * hidden, *dgates = dcells + batch * hidden;
    const index *operands = arguments.sizes + 4;
    const bool is_last = position + 1 == sequence;
    for (index i = thread_index(); i < batch * hidden; i += thread_count()) {
        const index image = i / hidden, unit = i % hidden, row = image * sequence + position;
        float dout = is_last ? 0.0f : douts[i], dcell = is_last ? 0.0f : dcells[i];
        if (is_last && operands[1] >= 0) {
            const number *dlast = read<number>(arguments, (int)operands[1]) + 2 * image * hidden;
            dout = widen(dlast[unit]);
            dcell = widen(dlast[hidden + unit]);
        }
        if (operands[0] >= 0) {
            dout += widen(read<number>(arguments, (int)operands[0])[row * hidden + unit]);
        }
        const number *gates = read<number>(arguments, (int)operands[2]) + row * 4 * hidden + unit;
        const number *cells = read<number>(arguments, (int)operands[3]);
        float previous = 0.0f;
        if (position > 0) {
            previous = widen(cells[(row - 1) * hidden + unit]);
        } else if (operands[4] >= 0) {
            previous = widen(read<number>(arguments, (int)operands[4])[(2 * image + 1) * hidden + unit]);
        }
        const float in = widen(gates[0]), forget = widen(gates[hidden]);
        const float candidate = widen(gates[2 * hidden]), out = widen(gates[3 * hidden]);
        const float tangent = tanhf(widen(cells[row * hidden + unit]));
        const float dc = dcell + dout * out * (1.0f - tangent * tangent);
        const float own[4] = {dc * candidate * in * (1.0f - in), dc * previous * forget * (1.0f - forget),
                              dc * in * (1.0f - candidate * candidate), dout * tangent * out * (1.0f - out)};
        for (int gate = 0; gate < 4; gate++) {
            dgates[(image * 4 + gate) * hidden + unit] = own[gate];
            narrow(written<number>(arguments, 0)[(row * 4 + gate) * hidden + unit], own[gate]);
        }
        dcells[i] = dc * forget;
    }
}

// The gradient of the previous position's output, from the gates' gradients in scratch memory.
// Writes dstate at the first position. sizes: batch, sequence, hidden, position, which read w is,
// whether dstate is written
KERNEL(lstm_output_gradient) {
    const index batch = arguments.sizes[0], hidden = arguments.sizes[2], position = arguments.sizes[3];
    float *douts = (float *)arguments.scratch, *dcells = douts + batch * hidden;
    const float *dgates = dcells + batch * hidden;
    const number *w = read<number>(arguments, (int)arguments.sizes[4]);
    for (index i = thread_index(); i < batch * hidden; i += thread_count()) {
        const index image = i / hidden, unit = i % hidden;
        float sum = 0.0f;
        for (index gate = 0; gate < 4 * hidden; gate++) {
            sum += dgates[image * 4 * hidden + gate] * widen(w[gate * hidden + unit]);
        }
        douts[i] = sum;
        if (position == 0 && arguments.sizes[5] != 0) {
            narrow(written<number>(arguments, 1)[2 * image * hidden + unit], sum);
            narrow(written<number>(arguments, 1)[(2 * image + 1) * hidden + unit], dcells[i]);
        }
    }
}

// The output before each position, to scratch memory. Reads (dprojected,) y (, state).
// sizes: batch, sequence, hidden, whether an initial state is given
KERNEL(lstm_previous_outputs) {
    const index batch = arguments.sizes[0], sequence = arguments.sizes[1], hidden = arguments.sizes[2];
    number *previous_outputs = (number *)arguments.scratch;
    for (index i = thread_index(); i < batch * sequence * hidden; i += thread_count()) {
        const index unit = i % hidden, position = i / hidden % sequence, image = i / hidden / sequence;
        if (position > 0) {
            previous_outputs[i] = read<number>(arguments, 1)[i - hidden];
        } else if (arguments.sizes[3] != 0) {
            previous_outputs[i] = read<number>(arguments, 2)[2 * image * hidden + unit];
        } else {
            narrow(previous_outputs[i], 0.0f);
        }
    }
}
