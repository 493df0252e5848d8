// Rotary position embedding (Su et al. 2021). A thread rotates one pair of features of one
// position, in all heads of all sequences: it computes the angle once, in double precision. Or it
// keeps one feature beyond those that are rotated.

// Reads x; writes y, which may be x. sizes: batch, positions, heads, half of the rotated features,
// first position, features that are kept, zigzag order
// numbers: base, direction (-1 for the gradient)
KERNEL(rope) {
    const number *x = read<number>(arguments, 0);
    number *y = written<number>(arguments, 0);
    const index batch = arguments.sizes[0], positions = arguments.sizes[1], heads = arguments.sizes[2], half = arguments.sizes[3];
    const index kept = arguments.sizes[5], features = 2 * half + kept;
    for (index i = thread_index(); i < positions * (half + kept); i += thread_count()) {
        const index position = i / (half + kept), feature = i % (half + kept);
        if (feature >= half) {
            for (index sequence_head = 0; sequence_head < batch * heads; sequence_head++) {
                const index row = ((sequence_head / heads) * positions + position) * heads + sequence_head % heads;
                y[row * features + half + feature] = x[row * features + half + feature];
            }
            continue;
        }
        const double frequency = pow((double)arguments.numbers[0], -(double)feature / (double)half);
        const index whole = position_at(arguments.sizes[4] + position, arguments.sizes[6], arguments.sizes[7]);
        const double angle = (double)arguments.numbers[1] * (double)whole * frequency;
        const float cosine = (float)cos(angle), sine = (float)sin(angle);
        for (index sequence_head = 0; sequence_head < batch * heads; sequence_head++) {
            const index at = (((sequence_head / heads) * positions + position) * heads + sequence_head % heads) * features + feature;
            const float a = widen(x[at]), b = widen(x[at + half]);
            narrow(y[at], a * cosine - b * sine);
            narrow(y[at + half], b * cosine + a * sine);
        }
    }
}
