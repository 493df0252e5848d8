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

// Reads gradients (, control); writes parameters (, velocities) (, masters). sizes: elements,
// whether there is a control, whether there is momentum, whether it is Nesterov's, which write the
// masters are (0 for the parameters themselves)
KERNEL(sgd) {
    const index elements = arguments.sizes[0];
    const bool has_momentum = arguments.sizes[2] != 0, is_nesterov = arguments.sizes[3] != 0, is_mixed = arguments.sizes[4] != 0;
    const UpdateInputs now = update_inputs(arguments, arguments.sizes[1] != 0);
    const float rate = (float)arguments.step->learning_rate, decay = (float)arguments.step->weight_decay;
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

// Reads gradients (, control); writes parameters, first moments, second moments (, masters).
// sizes: elements, whether there is a control, which write the masters are (0 for the parameters
// themselves)
KERNEL(adamw) {
    __shared__ float shared_rate, shared_root_scale;
    const index elements = arguments.sizes[0];
    const bool is_mixed = arguments.sizes[2] != 0;
    const StepParameters *step = arguments.step;
    const UpdateInputs now = update_inputs(arguments, arguments.sizes[1] != 0);
    if (threadIdx.x == 0) {
        // Double precision: at small steps 1 - 0.999^step loses four digits in single precision.
        const double count = now.step < 1.0 ? 1.0 : now.step;
        shared_rate = (float)(step->learning_rate / (1.0 - pow(step->beta1, count)));
        shared_root_scale = (float)(1.0 / sqrt(1.0 - pow(step->beta2, count)));
    }
    __syncthreads();
    const float rate = shared_rate, root_scale = shared_root_scale;
    const float beta1 = (float)step->beta1, beta2 = (float)step->beta2, epsilon = (float)step->epsilon;
    const float rest1 = (float)(1.0 - step->beta1), rest2 = (float)(1.0 - step->beta2);
    const float keep = 1.0f - (float)step->learning_rate * (float)step->weight_decay;
    const float *gradients = read<float>(arguments, 0);
    float *masters = written<float>(arguments, (int)arguments.sizes[2]);
    float *firsts = written<float>(arguments, 1), *seconds = written<float>(arguments, 2);
    for (index i = thread_index(); i < elements; i += thread_count()) {
        float parameter = masters[i];
        if (!now.is_skipped) {
            const float gradient = now.gradient_scale * gradients[i];
            const float first = beta1 * firsts[i] + rest1 * gradient;
            const float second = beta2 * seconds[i] + rest2 * gradient * gradient;
            firsts[i] = first;
            seconds[i] = second;
            parameter = keep * parameter - rate * first / (sqrtf(second) * root_scale + epsilon);
            masters[i] = parameter;
        }
        if (is_mixed) {
            narrow(written<number>(arguments, 0)[i], parameter);
        }
    }
}

// Reads the gradients' sum of squares; updates the control. sizes: whether to clip, whether the
// loss is scaled; one thread
KERNEL(update_control) {
    if (threadIdx.x != 0) {
        return;
    }
    const bool clips = arguments.sizes[0] != 0, scales = arguments.sizes[1] != 0;
    const float norm = read<float>(arguments, 0)[0];
    float *control = written<float>(arguments, 0);
    const float loss_scale = control[LOSS_SCALE];
    const float squared = norm / loss_scale / loss_scale;
    const bool overflowed = scales && !isfinite(norm);
    control[SQUARED_GRADIENT_NORM] = squared;
    control[IS_SKIPPED] = overflowed ? 1.0f : 0.0f;
    float factor = 1.0f / loss_scale;
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
