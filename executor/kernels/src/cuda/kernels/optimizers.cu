// The optimizers' updates, and the control of loss scale and clipping. In mixed precision the last
// write is the master copy: it is updated, and the parameter is rounded from it.

// The entries of a control tensor (foretell_models::Control).
enum { LOSS_SCALE, GRADIENT_FACTOR, IS_SKIPPED, UPDATES, STREAK, SQUARED_GRADIENT_NORM, SKIPPED_STEPS };

// The values that an update needs from the step's parameters and the control.
struct UpdateInputs {
    bool is_skipped;
    float gradient_scale;
    double step;
};
__device__ __forceinline__ UpdateInputs update_inputs(const Arguments &arguments, bool is_controlled) {
    UpdateInputs inputs = {false, (float)arguments.step->gradient_scale, (double)arguments.step->step};
    if (is_controlled) {
        const float *control = read<float>(arguments, 1);
        inputs.is_skipped = control[IS_SKIPPED] != 0.0f;
        inputs.gradient_scale *= control[GRADIENT_FACTOR];
        inputs.step = control[UPDATES];
    }
    return inputs;
}

// The weight decay of parameters that are exempt from it, or are not.
__device__ __forceinline__ float weight_decay(const Arguments &arguments, bool is_exempt) {
    return is_exempt ? 0.0f : (float)arguments.step->weight_decay;
}

// The factors of Adam's moments at a step.
struct Moments {
    float beta1, rest1, beta2, rest2, root_scale, epsilon;
    // Reciprocal of the correction of the first moment.
    double scale;

    // Updates the moments by a gradient; returns the step of a parameter. `rate` has the scale.
    __device__ __forceinline__ float update(float &first, float &second, float gradient, float rate) const {
        first = beta1 * first + rest1 * gradient;
        second = beta2 * second + rest2 * gradient * gradient;
        return rate * first / (sqrtf(second) * root_scale + epsilon);
    }
};

// The factors for all threads of the block, of which one computes the powers.
__device__ Moments moments_at(const Arguments &arguments, double update) {
    __shared__ double shared_scale;
    __shared__ float shared_root_scale;
    const StepParameters *step = arguments.step;
    if (threadIdx.x == 0) {
        // Double precision: at small steps 1 - 0.999^step loses four digits in single precision.
        const double count = update < 1.0 ? 1.0 : update;
        shared_scale = 1.0 / (1.0 - pow(step->beta1, count));
        shared_root_scale = (float)(1.0 / sqrt(1.0 - pow(step->beta2, count)));
    }
    __syncthreads();
    Moments moments;
    moments.beta1 = (float)step->beta1;
    moments.rest1 = (float)(1.0 - step->beta1);
    moments.beta2 = (float)step->beta2;
    moments.rest2 = (float)(1.0 - step->beta2);
    moments.root_scale = shared_root_scale;
    moments.epsilon = (float)step->epsilon;
    moments.scale = shared_scale;
    return moments;
}

// Reads gradients (, control); writes parameters (, velocities) (, masters). sizes: elements,
// whether there is a control, whether there is momentum, whether it is Nesterov's, which write the
// masters are (0 for the parameters themselves), whether the parameters are exempt from weight
// decay
KERNEL(sgd) {
    const index elements = arguments.sizes[0];
    const bool has_momentum = arguments.sizes[2] != 0, is_nesterov = arguments.sizes[3] != 0, is_mixed = arguments.sizes[4] != 0;
    const UpdateInputs now = update_inputs(arguments, arguments.sizes[1] != 0);
    const float rate = (float)arguments.step->learning_rate;
    const float decay = weight_decay(arguments, arguments.sizes[5] != 0);
    const float momentum = (float)arguments.step->momentum;
    const float *gradients = read<float>(arguments, 0);
    float *masters = written<float>(arguments, (int)arguments.sizes[4]), *velocities = written<float>(arguments, 1);
    for (index i = thread_index(); i < elements; i += thread_count()) {
        float parameter = masters[i];
        if (!now.is_skipped) {
            const float gradient = decay * parameter + now.gradient_scale * gradients[i];
            float step = gradient;
            if (has_momentum) {
                const float velocity = momentum * velocities[i] + gradient;
                velocities[i] = velocity;
                step = is_nesterov ? momentum * velocity + gradient : velocity;
            }
            parameter -= rate * step;
            masters[i] = parameter;
        }
        if (is_mixed) {
            narrow(written<number>(arguments, 0)[i], parameter);
        }
    }
}

// Reads the sum of the replicas' differences; writes parameters, outer parameters (, velocities),
// all in single precision. sizes: elements, replicas, whether there is momentum, whether it is
// Nesterov's, whether the parameters are mixed with the outer ones
KERNEL(outer_step) {
    const index elements = arguments.sizes[0];
    const float replicas = (float)arguments.sizes[1];
    const bool has_momentum = arguments.sizes[2] != 0, is_nesterov = arguments.sizes[3] != 0;
    const float rate = (float)arguments.step->outer_learning_rate, momentum = (float)arguments.step->outer_momentum;
    const float share = arguments.sizes[4] != 0 ? (float)arguments.step->outer_mixing : 0.0f;
    const float *sums = read<float>(arguments, 0);
    float *parameters = written<float>(arguments, 0), *outer = written<float>(arguments, 1);
    float *velocities = written<float>(arguments, 2);
    for (index i = thread_index(); i < elements; i += thread_count()) {
        const float gradient = sums[i] / replicas;
        float step = gradient;
        if (has_momentum) {
            const float velocity = momentum * velocities[i] + gradient;
            velocities[i] = velocity;
            step = is_nesterov ? momentum * velocity + gradient : velocity;
        }
        outer[i] -= rate * step;
        parameters[i] = share != 0.0f ? outer[i] + share * (parameters[i] - outer[i]) : outer[i];
    }
}

// Reads gradients (, control); writes parameters, first moments, second moments (, masters).
// sizes: elements, whether there is a control, which write the masters are (0 for the parameters
// themselves), whether the parameters are exempt from weight decay
KERNEL(adamw) {
    const index elements = arguments.sizes[0];
    const bool is_mixed = arguments.sizes[2] != 0;
    const StepParameters *step = arguments.step;
    const UpdateInputs now = update_inputs(arguments, arguments.sizes[1] != 0);
    const Moments moments = moments_at(arguments, now.step);
    const float rate = (float)(step->learning_rate * moments.scale);
    const float keep = 1.0f - (float)step->learning_rate * weight_decay(arguments, arguments.sizes[3] != 0);
    const float *gradients = read<float>(arguments, 0);
    float *masters = written<float>(arguments, (int)arguments.sizes[2]);
    float *firsts = written<float>(arguments, 1), *seconds = written<float>(arguments, 2);
    for (index i = thread_index(); i < elements; i += thread_count()) {
        float parameter = masters[i];
        if (!now.is_skipped) {
            const float step_of_adam = moments.update(firsts[i], seconds[i], now.gradient_scale * gradients[i], rate);
            parameter = keep * parameter - step_of_adam;
            masters[i] = parameter;
        }
        if (is_mixed) {
            narrow(written<number>(arguments, 0)[i], parameter);
        }
    }
}

// LAMB's direction: reads gradients (, control), parameters; writes directions, first moments,
// second moments. A skipped step has no direction. sizes: elements, whether there is a control,
// whether the parameters are exempt from weight decay
KERNEL(lamb_direction) {
    const index elements = arguments.sizes[0];
    const bool is_controlled = arguments.sizes[1] != 0;
    const UpdateInputs now = update_inputs(arguments, is_controlled);
    const Moments moments = moments_at(arguments, now.step);
    const float rate = (float)moments.scale, decay = weight_decay(arguments, arguments.sizes[2] != 0);
    const float *gradients = read<float>(arguments, 0), *parameters = read<float>(arguments, is_controlled ? 2 : 1);
    float *directions = written<float>(arguments, 0);
    float *firsts = written<float>(arguments, 1), *seconds = written<float>(arguments, 2);
    for (index i = thread_index(); i < elements; i += thread_count()) {
        float direction = 0.0f;
        if (!now.is_skipped) {
            const float step_of_adam = moments.update(firsts[i], seconds[i], now.gradient_scale * gradients[i], rate);
            direction = decay * parameters[i] + step_of_adam;
        }
        directions[i] = direction;
    }
}

// LAMB's step: reads directions (, control), the squared norms of parameter and direction; writes
// parameters (, masters). sizes: elements, whether there is a control, which write the masters are
// (0 for the parameters themselves)
KERNEL(lamb_step) {
    const index elements = arguments.sizes[0];
    const bool is_controlled = arguments.sizes[1] != 0, is_mixed = arguments.sizes[2] != 0;
    const UpdateInputs now = update_inputs(arguments, is_controlled);
    const float *directions = read<float>(arguments, 0), *norms = read<float>(arguments, is_controlled ? 2 : 1);
    const float ratio = norms[0] > 0.0f && norms[1] > 0.0f ? sqrtf(norms[0]) / sqrtf(norms[1]) : 1.0f;
    const float rate = (float)arguments.step->learning_rate * ratio;
    float *masters = written<float>(arguments, (int)arguments.sizes[2]);
    for (index i = thread_index(); i < elements; i += thread_count()) {
        float parameter = masters[i];
        if (!now.is_skipped) {
            parameter -= rate * directions[i];
            masters[i] = parameter;
        }
        if (is_mixed) {
            narrow(written<number>(arguments, 0)[i], parameter);
        }
    }
}

// Reads the gradients' sum of squares (, the labels' weight); updates the control. sizes: whether
// to clip, whether the loss is scaled, the predictions if there is a weight, else 0; one thread
KERNEL(update_control) {
    if (threadIdx.x != 0) {
        return;
    }
    const bool clips = arguments.sizes[0] != 0, scales = arguments.sizes[1] != 0;
    const float norm = read<float>(arguments, 0)[0];
    float *control = written<float>(arguments, 0);
    const float loss_scale = control[LOSS_SCALE];
    const float predictions = (float)arguments.sizes[2];
    const float divisor = predictions > 0.0f ? loss_scale * read<float>(arguments, 1)[0] / predictions : loss_scale;
    const float squared = norm / divisor / divisor;
    const bool overflowed = scales && !isfinite(norm);
    control[SQUARED_GRADIENT_NORM] = squared;
    control[IS_SKIPPED] = overflowed ? 1.0f : 0.0f;
    float factor = 1.0f / divisor;
    if (clips) {
        factor *= fminf((float)arguments.step->clip_norm / (sqrtf(squared) + 1e-6f), 1.0f);
    }
    control[GRADIENT_FACTOR] = factor;
    if (overflowed) {
        control[SKIPPED_STEPS] += 1.0f;
        control[STREAK] = 0.0f;
        control[LOSS_SCALE] = fmaxf(loss_scale * 0.5f, 1.17549435e-38f);
        return;
    }
    control[UPDATES] += 1.0f;
    control[STREAK] += 1.0f;
    if (scales && control[STREAK] >= (float)arguments.step->growth_interval) {
        control[STREAK] = 0.0f;
        control[LOSS_SCALE] = fminf(loss_scale * 2.0f, fmaxf(16777216.0f, loss_scale));
    }
}

// Muon's direction: reads gradients (, control); writes directions, momenta. A skipped step has no
// direction. sizes: elements, whether there is a control
KERNEL(muon_direction) {
    const UpdateInputs now = update_inputs(arguments, arguments.sizes[1] != 0);
    const float kept = (float)arguments.step->momentum;
    const float rest = (float)(1.0 - arguments.step->momentum) * now.gradient_scale;
    const float *gradients = read<float>(arguments, 0);
    float *momenta = written<float>(arguments, 1);
    for (index i = thread_index(); i < arguments.sizes[0]; i += thread_count()) {
        float direction = 0.0f;
        if (!now.is_skipped) {
            const float momentum = kept * momenta[i] + rest * gradients[i];
            momenta[i] = momentum;
            direction = kept * momentum + rest * gradients[i];
        }
        narrow(written<number>(arguments, 0)[i], direction);
    }
}

// Partial sums of squares of matrices. sizes: elements of a matrix, blocks of each; scratch: a
// double for each block
KERNEL(matrix_squares) {
    const index elements = arguments.sizes[0], blocks = arguments.sizes[1];
    const index matrix = blockIdx.x / blocks, block = blockIdx.x % blocks;
    const number *x = read<number>(arguments, 0) + matrix * elements;
    double sum = 0.0;
    for (index i = block * blockDim.x + threadIdx.x; i < elements; i += blocks * blockDim.x) {
        const double value = widen(x[i]);
        sum += value * value;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        ((double *)arguments.scratch)[blockIdx.x] = sum;
    }
}

// Divides matrices by their norms. sizes: as before; scratch: the partial sums
KERNEL(matrices_over_norms) {
    const index elements = arguments.sizes[0], blocks = arguments.sizes[1];
    const index matrix = blockIdx.x / blocks, block = blockIdx.x % blocks;
    const number *x = read<number>(arguments, 0) + matrix * elements;
    number *y = written<number>(arguments, 0) + matrix * elements;
    double sum = 0.0;
    for (index part = 0; part < blocks; ++part) {
        sum += ((const double *)arguments.scratch)[matrix * blocks + part];
    }
    const float factor = (float)(1.0 / (sqrt(sum) + 1e-7));
    for (index i = block * blockDim.x + threadIdx.x; i < elements; i += blocks * blockDim.x) {
        narrow(y[i], factor * widen(x[i]));
    }
}

// Reads squares A; writes, over A A, `a I + b A + c A A`. sizes: elements of all squares, side;
// numbers: a, b, c
KERNEL(square_polynomials) {
    const index side = arguments.sizes[1];
    const float a = arguments.numbers[0], b = arguments.numbers[1], c = arguments.numbers[2];
    const number *squares = read<number>(arguments, 0);
    number *polynomials = written<number>(arguments, 0);
    for (index i = thread_index(); i < arguments.sizes[0]; i += thread_count()) {
        const index within = i % (side * side);
        const float diagonal = within / side == within % side ? a : 0.0f;
        narrow(polynomials[i], diagonal + b * widen(squares[i]) + c * widen(polynomials[i]));
    }
}

// Muon's step: reads directions (, control); writes parameters (, masters). sizes: elements,
// whether there is a control, which write the masters are (0 for the parameters themselves),
// whether the parameters are exempt from weight decay; numbers: what multiplies the learning rate
KERNEL(muon_step) {
    const index elements = arguments.sizes[0];
    const bool is_mixed = arguments.sizes[2] != 0;
    const UpdateInputs now = update_inputs(arguments, arguments.sizes[1] != 0);
    const float learning_rate = (float)arguments.step->learning_rate;
    const float keep = 1.0f - learning_rate * weight_decay(arguments, arguments.sizes[3] != 0);
    const float rate = learning_rate * arguments.numbers[0];
    const number *directions = read<number>(arguments, 0);
    float *masters = written<float>(arguments, (int)arguments.sizes[2]);
    for (index i = thread_index(); i < elements; i += thread_count()) {
        float parameter = masters[i];
        if (!now.is_skipped) {
            parameter = keep * parameter - rate * widen(directions[i]);
            masters[i] = parameter;
        }
        if (is_mixed) {
            narrow(written<number>(arguments, 0)[i], parameter);
        }
    }
}
