//! Divisors of whole numbers.

/// Returns the greatest common divisor of two numbers; of a number and 0, the number.
pub(super) fn greatest_common_divisor(one: usize, other: usize) -> usize {
    if other == 0 { one } else { greatest_common_divisor(other, one % other) }
}

/// Returns the divisors of a number, ascending.
pub(super) fn divisors(number: usize) -> Vec<usize> {
    let root = number.isqrt();
    let small: Vec<usize> = (1..=root).filter(|&divisor| number.is_multiple_of(divisor)).collect();
    let large = small.iter().rev().map(|divisor| number / divisor).filter(|&large| large > root);
    small.iter().copied().chain(large).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_divisors_are_listed_in_ascending_order() {
        for number in 0usize..200 {
            let all: Vec<usize> = (1..=number).filter(|divisor| number.is_multiple_of(*divisor)).collect();
            assert_eq!(divisors(number), all);
        }
    }
}
