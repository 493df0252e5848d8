//! Device time of a framework's operators: products by shape, attention by shape, everything else
//! by the bytes that it moves. These times depend only on the device's profile; no stack has a
//! factor on them.

use crate::gpu::device::GpuProfile;
use crate::gpu::format::ProductFormat;
use crate::gpu::product::{Product, product_time};
use foretell_models::operator_tables::{Element, TracedOperator, TracedTensor};
use foretell_units::Seconds;

/// Exponent with which the efficiency of fused attention falls with the width of heads below 128,
/// as in `gpu/attention.rs`.
const NARROW_HEADS: f64 = 0.23;
/// Queries in a tile of FlashAttention, and the waves of tiles at which it reaches half of its
/// efficiency, as in `gpu/attention.rs`.
const QUERY_TILE: f64 = 128.0;
const HALF_WAVES: f64 = 1.2;
/// Ratio of the matrix products in attention's backward pass to those in its forward pass: five to
/// two.
const BACKWARD_PRODUCTS: f64 = 2.5;

/// Time of kernels on one kind of device.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeviceKernels<'a> {
    pub(super) gpu: &'a GpuProfile,
    /// Whether PyTorch's cast to sixteen bits processes several elements together.
    pub(super) narrows_at_once: bool,
}

impl DeviceKernels<'_> {
    /// The time of an operator, with `values` for the table's symbols.
    pub(super) fn operator(&self, operator: &TracedOperator, values: &[f64]) -> Seconds {
        let bytes: f64 = operator.inputs.iter().chain(&operator.outputs).map(|tensor| tensor.bytes(values)).sum();
        let arithmetic = products(operator, values)
            .map(|(product, element)| product_time(&product, format(element), self.gpu, 1.0))
            .or_else(|| self.attention(operator, values));
        let alone = arithmetic.unwrap_or_else(|| self.moving(bytes).max(self.indexing(operator, values)));
        alone + self.gpu.launch
    }

    /// The time in which PyTorch's elementwise kernels compute the address of each operand element.
    /// Zero if they need not.
    fn indexing(&self, operator: &TracedOperator, values: &[f64]) -> Seconds {
        Seconds::new(
            indexed_elements(operator, values, self.narrows_at_once) / (self.gpu.indexed_elements * self.gpu.multiprocessors),
        )
    }

    /// The time in which the memory moves `bytes`. The last-level cache may still hold those that
    /// the previous kernel wrote.
    pub(super) fn moving(&self, bytes: f64) -> Seconds {
        let cached = bytes.min(self.gpu.cache.value());
        let weight = bytes - cached + cached / self.gpu.cache_speed;
        Seconds::new(weight / (self.gpu.memory_bandwidth.value() * self.gpu.memory_efficiency))
    }

    /// The time of a fused attention kernel; `None` for other operators.
    fn attention(&self, operator: &TracedOperator, values: &[f64]) -> Option<Seconds> {
        let Attention { flops, format, is_backward, tiles, width } = attention(operator, values)?;
        let [reached_forward, reached_backward] = self.gpu.attention;
        let reached = if is_backward { reached_backward } else { reached_forward };
        let waves = tiles / self.gpu.multiprocessors;
        let narrow = (width / 128.0).min(1.0).powf(NARROW_HEADS);
        let share = reached * self.gpu.ampere_attention * narrow * waves / (waves + HALF_WAVES);
        Some(Seconds::new(flops / (self.gpu.peak(format).value() * share)))
    }
}

/// Elementwise operators of PyTorch. If all operands have one format and are contiguous, their
/// kernels read several elements together (`TensorIterator`; `gpu_kernel_impl` in `CUDALoops.cuh`).
/// Otherwise they compute the address of each element.
const ELEMENTWISE: [&str; 17] = [
    "_to_copy",
    "add",
    "add_",
    "bitwise_and",
    "copy_",
    "div",
    "div_",
    "exp",
    "ge",
    "masked_fill",
    "mul",
    "mul_",
    "neg",
    "pow",
    "rsub",
    "sub",
    "where",
];

/// Operators that concatenate tensors, write a part into a whole, or make strided elements
/// contiguous.
const ASSEMBLING: [&str; 4] = ["cat", "clone", "slice_backward", "select_backward"];

/// The number of elements that a kernel writes one by one. 0 if it writes several together.
fn indexed_elements(operator: &TracedOperator, values: &[f64], narrows_at_once: bool) -> f64 {
    let (Some(name), Some(output)) = (operator.name.strip_prefix("aten."), operator.outputs.first()) else { return 0.0 };
    let written = output.shape(values).iter().product::<f64>();
    let is_cast = |input: &TracedTensor| {
        let narrows =
            name == "_to_copy" && input.element == Element::F32 && matches!(output.element, Element::Bf16 | Element::F16);
        input.element != output.element && !(narrows && narrows_at_once)
    };
    let is_indexed = |input: &TracedTensor| {
        let is_repeated = input.dimensions.iter().any(|(_, repeats)| *repeats);
        let elements = input.shape(values).iter().product::<f64>();
        elements > 1.0 && (is_repeated || elements != written || is_cast(input))
    };
    let is_elementwise = ELEMENTWISE.contains(&name) && operator.inputs.iter().any(is_indexed);
    if is_elementwise || ASSEMBLING.contains(&name) { written } else { 0.0 }
}

/// The number of floating-point operations of a matrix product or of fused attention. 0 for other
/// operators.
pub(super) fn flops(operator: &TracedOperator, values: &[f64]) -> f64 {
    let of_product = |product: Product| {
        2.0 * [product.batch, product.rows, product.columns, product.contracted]
            .into_iter()
            .map(|size| size as f64)
            .product::<f64>()
    };
    let product = products(operator, values).map(|(product, _)| of_product(product));
    // Causal attention counts all scores, as in Programs.
    let counted = if operator.causal { 2.0 } else { 1.0 };
    product.or_else(|| attention(operator, values).map(|attention| attention.flops * counted)).unwrap_or(0.0)
}

/// A fused attention kernel.
struct Attention {
    flops: f64,
    format: ProductFormat,
    is_backward: bool,
    /// Number of query tiles, over all heads and samples.
    tiles: f64,
    /// Features per head.
    width: f64,
}

/// The fused attention that an operator computes. `None` for other operators.
fn attention(operator: &TracedOperator, values: &[f64]) -> Option<Attention> {
    let name = operator.name.as_str();
    if !["flash_attention", "efficient_attention", "cudnn_attention"].iter().any(|kernel| name.contains(kernel)) {
        return None;
    }
    let is_backward = name.ends_with("backward");
    // The gradient of the output precedes the operands.
    let operands = operator.inputs.get(usize::from(is_backward)..)?;
    let [query, key, value, ..] = operands else { return None };
    let format = format(query.element);
    let (query, key) = (query.shape(values), key.shape(values));
    let ([batch, heads, queries, width], [.., keys, _]) = (query.as_slice(), key.as_slice()) else { return None };
    let of_values = value.shape(values).last().copied().unwrap_or(*width);
    let whole = 2.0 * batch * heads * queries * keys * (width + of_values);
    let forward = if operator.causal { whole / 2.0 } else { whole };
    let flops = if is_backward { forward * BACKWARD_PRODUCTS } else { forward };
    Some(Attention { flops, format, is_backward, tiles: batch * heads * (queries / QUERY_TILE).ceil(), width: *width })
}

fn format(element: Element) -> ProductFormat {
    match element {
        Element::Bf16 => ProductFormat::Bf16,
        Element::F16 => ProductFormat::Fp16,
        // Devices are assumed to have equal rates for eight-bit integers and eight-bit floats.
        Element::F8 | Element::I8 => ProductFormat::Fp8,
        Element::F32 | Element::F64 | Element::C64 | Element::I64 | Element::I32 | Element::Bool => ProductFormat::Fp32,
    }
}

/// The matrix product that an operator computes, with its operands' format. `None` for other
/// operators.
fn products(operator: &TracedOperator, values: &[f64]) -> Option<(Product, Element)> {
    let name = operator.name.rsplit('.').next().unwrap_or("");
    // bitsandbytes' product of eight-bit integers takes the weight in its stored layout, by output
    // features.
    let is_transposed = name == "int8_linear_matmul";
    let first = match name {
        _ if is_transposed => 0,
        "mm" | "bmm" | "_grouped_mm" | "_scaled_mm" => 0,
        "addmm" | "baddbmm" => 1,
        "convolution" | "convolution_backward" => return convolution(operator, values, name),
        _ => return of_experts(operator, values, name),
    };
    let (left, right) = (operator.inputs.get(first)?, operator.inputs.get(first + 1)?);
    let output = operator.outputs.first()?;
    let whole = |size: f64| size.max(1.0).round() as usize;
    let (left_shape, mut right_shape) = (left.shape(values), right.shape(values));
    if is_transposed {
        right_shape.reverse();
    }
    let (batch, rows, contracted, columns) = match (left_shape.as_slice(), right_shape.as_slice()) {
        ([rows, contracted], [_, columns]) => {
            // A grouped weight gradient contracts the rows of each expert separately.
            let experts = output.shape(values).first().copied().filter(|_| output.dimensions.len() == 3).unwrap_or(1.0);
            (experts, *rows, contracted / experts, *columns)
        }
        ([rows, contracted], [experts, _, columns]) => (*experts, rows / experts, *contracted, *columns),
        ([batch, rows, contracted], [_, _, columns]) => (*batch, *rows, *contracted, *columns),
        _ => return None,
    };
    let product = Product {
        batch: whole(batch),
        rows: whole(rows),
        columns: whole(columns),
        contracted: whole(contracted),
        operand_bytes: left.element.bytes() as f64,
        output_bytes: output.element.bytes() as f64,
    };
    Some((product, left.element))
}

/// Liger's fused kernels of experts. The number is the dimension of each expert's weight that the
/// kernel contracts; `None` if it sums the weight's gradient over tokens.
const OF_EXPERTS: [(&str, Option<usize>); 6] = [
    ("_fused_up_proj_swiglu_kernel", Some(2)),
    ("_fused_down_proj_kernel", Some(2)),
    ("_moe_bwd_down_proj_kernel", Some(1)),
    ("_moe_bwd_dX_expanded_kernel", Some(1)),
    ("_moe_bwd_dW1_kernel", None),
    ("_moe_bwd_dW2_kernel", None),
];

/// The grouped product that one of Liger's expert kernels computes. Its inputs, as Triton lists
/// them, include the weights of all experts and the rows of tokens sorted by expert.
fn of_experts(operator: &TracedOperator, values: &[f64], name: &str) -> Option<(Product, Element)> {
    let (_, contracted) = OF_EXPERTS.iter().find(|(kernel, _)| *kernel == name)?;
    let weight = operator.inputs.iter().find(|input| input.dimensions.len() == 3)?;
    let shape = weight.shape(values);
    let matrices = operator.inputs.iter().filter(|input| input.dimensions.len() == 2);
    let tokens = matrices.map(|input| input.shape(values)[0]).fold(0.0, f64::max) / shape[0];
    let (rows, contracted, columns) = match contracted {
        Some(2) => (tokens, shape[2], shape[1]),
        Some(_) => (tokens, shape[1], shape[2]),
        None => (shape[1], tokens, shape[2]),
    };
    let [batch, rows, contracted, columns] = [shape[0], rows, contracted, columns].map(|size| size.max(1.0).round() as usize);
    let bytes = weight.element.bytes() as f64;
    Some((Product { batch, rows, columns, contracted, operand_bytes: bytes, output_bytes: bytes }, weight.element))
}

/// A convolution, as the matrix product that it is equivalent to. A backward convolution has two
/// products: the gradients of the input and of the weight.
fn convolution(operator: &TracedOperator, values: &[f64], name: &str) -> Option<(Product, Element)> {
    let is_backward = name == "convolution_backward";
    let (image, weight): (&TracedTensor, &TracedTensor) =
        (operator.inputs.get(usize::from(is_backward))?, operator.inputs.get(1 + usize::from(is_backward))?);
    let output = if is_backward { operator.inputs.first()? } else { operator.outputs.first()? };
    let (output_shape, weight_shape) = (output.shape(values), weight.shape(values));
    let columns = *weight_shape.first()?;
    let contracted: f64 = weight_shape.iter().skip(1).product();
    let rows = output_shape.iter().product::<f64>() / columns;
    let whole = |size: f64| size.max(1.0).round() as usize;
    let product = Product {
        batch: 1,
        rows: whole(rows * if is_backward { 2.0 } else { 1.0 }),
        columns: whole(columns),
        contracted: whole(contracted),
        operand_bytes: image.element.bytes() as f64,
        output_bytes: output.element.bytes() as f64,
    };
    Some((product, image.element))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::Profiles;
    use foretell_models::operator_tables::Formula;

    fn tensor(element: Element, sizes: &[&str]) -> TracedTensor {
        let dimension = |size: &&str| (Formula::parse(size, &[]).expect("a number"), false);
        TracedTensor { element, dimensions: sizes.iter().map(dimension).collect() }
    }

    /// Microseconds of an operator on a device.
    fn time(device: &str, name: &str, inputs: Vec<TracedTensor>, output: TracedTensor, narrows_at_once: bool) -> f64 {
        let profiles = Profiles::library().expect("the library is sound");
        let gpu = profiles.gpu(device).expect("is in the library");
        let operator = TracedOperator { name: name.into(), inputs, outputs: vec![output], causal: false };
        DeviceKernels { gpu, narrows_at_once }.operator(&operator, &[]).value() * 1e6
    }

    #[test]
    fn casts_take_what_pytorch_measured() {
        let cast = |device, from, to, count: &str, narrows_at_once| {
            time(device, "aten._to_copy", vec![tensor(from, &[count])], tensor(to, &[count]), narrows_at_once)
        };
        let near = |found: f64, measured: f64| assert!((found / measured - 1.0).abs() < 0.08, "{found} us, measured {measured}");
        // pytorch/pytorch#195542 and #137053, before each.
        near(cast("a100-sxm-80g", Element::Bf16, Element::F32, "67108864", true), 362.46);
        near(cast("h100-pcie-80g", Element::F32, Element::F16, "134217728", false), 552.6);
        let at_once = cast("h100-pcie-80g", Element::F32, Element::F16, "134217728", true);
        assert!(at_once < 500.0, "{at_once} us");
    }

    #[test]
    fn fused_kernels_of_experts_have_the_operations_of_their_products() {
        let (rows, up, down) = (&["512", "192"], &["8", "384", "64"], &["8", "64", "192"]);
        let of = |name: &str, inputs: Vec<TracedTensor>| {
            let operator = TracedOperator { name: format!("triton.{name}"), inputs, outputs: Vec::new(), causal: false };
            flops(&operator, &[])
        };
        let floats = |sizes: &[&str]| tensor(Element::Bf16, sizes);
        let of_up = 2.0 * 512.0 * 384.0 * 64.0;
        let of_down = 2.0 * 512.0 * 64.0 * 192.0;
        assert!((of("_fused_up_proj_swiglu_kernel", vec![floats(&["256", "64"]), floats(up), floats(rows)]) - of_up).abs() < 1.0);
        assert!(
            (of("_moe_bwd_dW1_kernel", vec![floats(&["256", "64"]), floats(&["512", "384"]), floats(up)]) - of_up).abs() < 1.0
        );
        assert!(
            (of("_moe_bwd_down_proj_kernel", vec![floats(&["256", "64"]), floats(down), floats(rows)]) - of_down).abs() < 1.0
        );
        assert!(of("_moe_router_scatter_kernel", vec![floats(rows)]) < 1.0);
    }

    #[test]
    fn operands_that_follow_one_another_take_the_time_of_their_bytes() {
        let whole = || tensor(Element::Bf16, &["8192", "4096"]);
        let product = |other: TracedTensor| time("h100-sxm-80g", "aten.mul", vec![whole(), other], whole(), true);
        let repeated = product(tensor(Element::Bf16, &["4096"]));
        assert!(product(whole()) < repeated, "{} beside {repeated} us", product(whole()));
        let alone = time("h100-sxm-80g", "aten.silu", vec![whole()], whole(), true);
        assert!(time("h100-sxm-80g", "aten.cat", vec![whole()], whole(), true) > 1.5 * alone);
    }
}
