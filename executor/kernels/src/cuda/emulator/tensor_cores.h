// Tensor cores and asynchronous copies. `tensor.cuh` documents the functions and the fragments.

#pragma once

#include "block.h"

#if PRECISION != 0

// Checks that an address is 16 aligned bytes of the block's dynamic shared memory.
static bool check_shared_16(const void *pointer) {
    const uintptr_t address = (uintptr_t)pointer, start = (uintptr_t)dynamic_memory;
    const bool is_valid = address % 16 == 0 && address >= start && address + 16 <= start + dynamic_bytes;
    has_bad_address |= !is_valid;
    return is_valid;
}

// A copy happens only when its thread waits, as late as the hardware may do it. Until then the
// target holds NaNs.
static void copy_async(void *to, const void *from, bool has_data) {
    int &count = block->copy_counts[current];
    has_bad_address |= count == MAX_COPIES || (uintptr_t)from % 16 != 0;
    if (!check_shared_16(to) || has_bad_address) {
        return;
    }
    memset(to, 0xFF, 16);
    block->copies[current][count++] = Copy{to, from, has_data};
}
static void wait_for_copies() {
    for (int i = 0; i < block->copy_counts[current]; i++) {
        const Copy &copy = block->copies[current][i];
        if (copy.has_data) {
            memcpy(copy.to, copy.from, 16);
        } else {
            memset(copy.to, 0, 16);
        }
    }
    block->copy_counts[current] = 0;
}

// Exchanges the operands of a warp's threads; returns those of lane 0 and on.
static const WarpOperand *gather(const WarpOperand &own) {
    const int turn = block->fibers[current].warp_syncs % 2;
    block->warp_operands[turn][current] = own;
    __syncwarp(0xFFFFFFFFu);
    return block->warp_operands[turn] + current / WARP_SIZE * WARP_SIZE;
}
static float widened(unsigned short bits) {
    return PRECISION == 1 ? __uint_as_float((unsigned)bits << 16) : emulated_half_to_single(bits);
}

static void load(unsigned (&to)[4], const void *row, bool is_transposed) {
    check_shared_16(row);
    const WarpOperand *all = gather(WarpOperand{row});
    const int lane = current % WARP_SIZE;
    for (int matrix = 0; matrix < 4; matrix++) {
        unsigned short two[2];
        for (int i = 0; i < 2; i++) {
            const int r = is_transposed ? lane % 4 * 2 + i : lane / 4, c = is_transposed ? lane / 4 : lane % 4 * 2 + i;
            two[i] = has_bad_address ? 0x7FFF : ((const unsigned short *)all[matrix * 8 + r].row)[c];
        }
        to[matrix] = two[0] | (unsigned)two[1] << 16;
    }
}
static void load_matrices(unsigned (&to)[4], const void *row) { load(to, row, false); }
static void load_transposed(unsigned (&to)[4], const void *row) { load(to, row, true); }

// Left operand: word 0 has row lane / 4, columns lane % 4 * 2 and the next; word 1 the row + 8;
// words 2 and 3 the columns + 8. Right operand: word 0 has rows lane % 4 * 2 and the next of column
// lane / 4; word 1 the rows + 8.
static void multiply_add(float (&sum)[4], const unsigned (&left)[4], unsigned right, unsigned right_after) {
    WarpOperand own;
    const unsigned words[6] = {left[0], left[1], left[2], left[3], right, right_after};
    for (int i = 0; i < 12; i++) {
        own.numbers[i] = widened((unsigned short)(words[i / 2] >> i % 2 * 16));
    }
    const WarpOperand *all = gather(own);
    const int lane = current % WARP_SIZE;
    for (int element = 0; element < 4; element++) {
        const int row = lane / 4 + element / 2 * 8, column = lane % 4 * 2 + element % 2;
        double total = sum[element];
        for (int k = 0; k < 16; k++) {
            const float a = all[row % 8 * 4 + k % 8 / 2].numbers[(row / 8 + k / 8 * 2) * 2 + k % 2];
            const float b = all[column * 4 + k % 8 / 2].numbers[8 + k / 8 * 2 + k % 2];
            total += (double)a * b;
        }
        sum[element] = (float)total;
    }
}
static unsigned narrowed(float x) {
    if (PRECISION == 2) {
        return emulated_single_to_half(x);
    }
    const unsigned bits = __float_as_uint(x);
    return x != x ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
static unsigned pack(float low, float high) { return narrowed(low) | narrowed(high) << 16; }
static float power_of_two(float x) { return exp2f(x); }

#endif
