// Rotary position embedding (Su et al. 2021). A thread rotates one pair of features of one
// position, in all heads of all sequences: it computes the angle once, in double precision.

// Reads x; writes y, which may be x. sizes: batch, positions, heads, half of a head's features,
// first position; numbers: base, direction (-1 for the gradient)
KERNEL(rope) {
    const number *x = read<number>(arguments, 0);
    number *y = written<number>(arguments, 0);
    const index batch = arguments.sizes[0], positions = arguments.sizes[1], heads = arguments.sizes[2], half = arguments.sizes[3];
    for (index i = thread_index(); i < positions * half; i += thread_count()) {
        const index position = i / half, feature = i % half;
        const double frequency = pow((double)arguments.numbers[0], -(double)feature / (double)half);
        const double angle = (double)arguments.numbers[1] * (double)(arguments.sizes[4] + position) * frequency;
        const float cosine = (float)cos(angle), sine = (float)sin(angle);
        for (index sequence_head = 0; sequence_head < batch * heads; sequence_head++) {
            const index at = (((sequence_head / heads) * positions + position) * heads + sequence_head % heads) * 2 * half + feature;
            const float a = widen(x[at]), b = widen(x[at + half]);
            narrow(y[at], a * cosine - b * sine);
            narrow(y[at + half], b * cosine + a * sine);
        }
    }
}
