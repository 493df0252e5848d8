//! Arithmetic of the whole numbers that make shapes.

use super::messages::Node;
use super::shapes::without_batch;
use super::values::{Known, MOST_NUMBERS};

/// Sums, products and the like, element by element. `None` if the operator is not one of these.
pub(super) fn arithmetic(operator: &str, left: &[i64], right: &[i64]) -> Option<Vec<i64>> {
    let function: fn(i64, i64) -> Option<i64> = match operator {
        "Add" => i64::checked_add,
        "Sub" => i64::checked_sub,
        "Mul" => i64::checked_mul,
        "Div" => i64::checked_div,
        "Mod" => i64::checked_rem,
        "Max" => |one, other| Some(one.max(other)),
        "Min" => |one, other| Some(one.min(other)),
        "Equal" => |one, other| Some(i64::from(one == other)),
        _ => return None,
    };
    let count = left.len().max(right.len());
    (0..count).map(|index| function(repeated_at(left, index)?, repeated_at(right, index)?)).collect()
}

/// Element `index`; a single number is repeated.
fn repeated_at(numbers: &[i64], index: usize) -> Option<i64> {
    if numbers.len() == 1 { numbers.first().copied() } else { numbers.get(index).copied() }
}

/// The numbers of `yes` where `condition` is not 0, and those of `no` elsewhere.
pub(super) fn chosen(condition: &[i64], yes: &[i64], no: &[i64]) -> Option<Vec<i64>> {
    let count = condition.len().max(yes.len()).max(no.len());
    let one = |index| repeated_at(if repeated_at(condition, index)? == 0 { no } else { yes }, index);
    (0..count).map(one).collect()
}

/// A tensor of one repeated number.
pub(super) fn repeated(node: &Node, inputs: &[Known]) -> Known {
    let Some(shape) = inputs.first().and_then(Known::numbers) else { return Known::Constant { shape: vec![1] } };
    let whole = node.tensor("value").filter(|value| value.is_whole()).and_then(|value| value.whole_numbers());
    match (shape, whole.as_deref()) {
        (&[count @ 0..=MOST_NUMBERS], Some(&[value])) => Known::Numbers { values: vec![value; count as usize], is_scalar: false },
        _ => Known::Constant { shape: without_batch(shape) },
    }
}

/// The numbers from the first input to the second, in steps of the third.
///
/// # Errors
/// A step of 0, and more numbers than an index counts.
pub(super) fn range(inputs: &[Known]) -> Result<Known, String> {
    let one = |index: usize| inputs.get(index).and_then(Known::numbers).and_then(|numbers| numbers.first().copied());
    let (Some(start), Some(end), Some(step)) = (one(0), one(1), one(2)) else {
        return Ok(Known::Constant { shape: vec![1] });
    };
    if step == 0 {
        return Err("its step is 0".into());
    }
    let length = (i128::from(end) - i128::from(start)) * i128::from(step.signum());
    let count = (length.max(0) as u128).div_ceil(u128::from(step.unsigned_abs()));
    let count = i64::try_from(count).map_err(|_| "it is too long")?;
    Ok(Known::Constant { shape: without_batch(&[count]) })
}
