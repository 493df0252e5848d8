//! Matrix products: by the library where it has an algorithm, else by kernels.

use super::dispatcher::{Dispatcher, Grid, LaunchConfig};
use crate::cuda::driver::{CudaError, DeviceAddress, Epilogue, EpilogueActivation, Fp8Scales, MatrixOperand, Product, addresses};
use foretell_models::EightBits;
use foretell_units::DataType;

/// Alignment, in bytes, of a matrix's rows that tensor cores need: TMA requires it of strides,
/// `wgmma` of its operands' rows.
pub(super) const ROW_ALIGNMENT: usize = 16;

/// Returns the value by which `product.cu` knows an activation.
fn activation_number(activation: EpilogueActivation) -> usize {
    match activation {
        EpilogueActivation::None => 0,
        EpilogueActivation::Relu => 1,
        EpilogueActivation::Gelu => 2,
        EpilogueActivation::GeluAux(_) => 3,
        EpilogueActivation::GeluGradient(_) => 4,
    }
}

/// Returns the value by which `fp8.cu` knows a format.
pub(super) fn fp8_format_number(format: EightBits) -> usize {
    match format {
        EightBits::E4M3 => 0,
        EightBits::E5M2 => 1,
    }
}

impl Dispatcher<'_> {
    /// Queues a product. Tries, in this order: the library with the fused epilogue; the library
    /// without it, followed by a kernel for the epilogue; a kernel of `product.cu`. An fp8 product
    /// without a library algorithm is decoded first.
    ///
    /// # Errors
    /// [`CudaError::ProductNotSupported`] if the library cannot fuse a requested bias gradient;
    /// nothing is queued.
    ///
    /// # Safety
    /// The product's operands are valid in device memory.
    pub(super) unsafe fn multiply(&mut self, product: Product) -> Result<(), CudaError> {
        debug_assert!(product.batch == 1 || product.epilogue.is_plain(), "an epilogue needs a batch of 1");
        let Product { batch, rows, columns, contracted, left, right, epilogue, .. } = product;
        let not_supported = CudaError::ProductNotSupported { rows, columns, contracted };
        let has_bias_gradient = epilogue.bias_gradient.is_some();
        if batch * rows * columns == 0 {
            return if has_bias_gradient { Err(not_supported) } else { Ok(()) };
        }
        let plain = Product { epilogue: Epilogue::default(), ..product };
        let attempts = [Some(&product), Some(&plain).filter(|_| !epilogue.is_plain() && !has_bias_gradient)];
        for attempt in attempts.into_iter().flatten().filter(|_| contracted > 0) {
            // SAFETY: the caller's promise.
            match unsafe { self.backend.driver.multiply(attempt, self.backend.stream) } {
                Err(CudaError::ProductNotSupported { .. } | CudaError::MissingLibrary { .. }) => {}
                Err(error) => return Err(error),
                Ok(()) if attempt.epilogue == epilogue => return Ok(()),
                // SAFETY: the caller's promise.
                Ok(()) => return unsafe { self.apply_epilogue(&product) },
            }
        }
        if has_bias_gradient {
            return Err(not_supported);
        }
        if let Some(fp8) = product.fp8 {
            // SAFETY: the caller's promise.
            return unsafe { self.multiply_decoded(&product, fp8) };
        }
        let is_single = product.output != product.input || self.call.precision == DataType::Fp32;
        let flags = [left.is_transposed, right.is_transposed, epilogue.bias.is_some(), is_single].map(usize::from);
        let [left_pitch, right_pitch, result_pitch] = product.stored().map(|[.., pitch]| pitch);
        let activation = activation_number(epilogue.activation);
        let [left_transposed, right_transposed, has_bias, is_single] = flags;
        let sizes = [
            rows,
            columns,
            contracted,
            left_transposed,
            right_transposed,
            has_bias,
            activation,
            is_single,
            left_pitch,
            right_pitch,
            result_pitch,
        ];
        let tiles = rows.div_ceil(16) * columns.div_ceil(16);
        let config = LaunchConfig::new("product", Grid::Blocks([tiles, 1, batch]), &sizes);
        // SAFETY: the caller's promise.
        unsafe { self.launch_product(config, &product) }
    }

    /// Queues a kernel that applies a product's epilogue to its plain result.
    unsafe fn apply_epilogue(&mut self, product: &Product) -> Result<(), CudaError> {
        let Product { rows, columns, epilogue, .. } = *product;
        let pitch = product.result_pitch.unwrap_or(columns);
        let sizes = [rows, columns, usize::from(epilogue.bias.is_some()), activation_number(epilogue.activation), pitch];
        let config = LaunchConfig::new("product_epilogue", Grid::Elements(rows * columns), &sizes);
        // SAFETY: the caller's promise.
        unsafe { self.launch_product(config, product) }
    }

    /// Queues a kernel of `product.cu` with a product's operands.
    unsafe fn launch_product(&mut self, config: LaunchConfig<'_>, product: &Product) -> Result<(), CudaError> {
        let Product { left, right, epilogue, .. } = *product;
        let mut arguments = self.arguments(&config);
        let null = DeviceAddress::NULL;
        let (gelu_argument, gelu_aux) = match epilogue.activation {
            EpilogueActivation::GeluGradient(argument) => (argument, null),
            EpilogueActivation::GeluAux(aux) => (null, aux),
            EpilogueActivation::None | EpilogueActivation::Relu | EpilogueActivation::Gelu => (null, null),
        };
        arguments.reads = addresses([left.address, right.address, epilogue.bias.unwrap_or(null), gelu_argument]);
        arguments.writes = addresses([product.result, gelu_aux]);
        arguments.accumulate = i64::from(product.accumulate);
        // SAFETY: the caller's promise.
        unsafe { self.launch_with(config, arguments) }
    }

    /// Returns a plain product in the call's precision, which overwrites a dense result.
    pub(super) fn product(
        &self,
        [rows, columns, contracted]: [usize; 3],
        left: MatrixOperand,
        right: MatrixOperand,
        result: DeviceAddress,
    ) -> Product {
        Product {
            batch: 1,
            rows,
            columns,
            contracted,
            left,
            right,
            result,
            result_pitch: None,
            input: self.call.precision,
            output: self.call.precision,
            accumulate: false,
            epilogue: Epilogue::default(),
            tf32: self.tf32,
            fp8: None,
        }
    }

    /// Queues an fp8 product as a product of its decoded operands. Decoding to bf16 is exact,
    /// because scales are powers of two. This is the fallback for devices without fp8 products, and
    /// for sizes that the library's fp8 products do not support.
    unsafe fn multiply_decoded(&mut self, product: &Product, fp8: Fp8Scales) -> Result<(), CudaError> {
        let width = self.width();
        let pitch = product.contracted.next_multiple_of(ROW_ALIGNMENT / width);
        let [left_rows, right_rows] = [product.rows, product.columns];
        let left = self.scratch((left_rows + right_rows) * pitch * width)?;
        let right = left.offset(left_rows * pitch * width);
        let operands = [(product.left, left, left_rows), (product.right, right, right_rows)];
        for (index, (operand, to, rows)) in operands.into_iter().enumerate() {
            let sizes = [rows, product.contracted, pitch, fp8_format_number(fp8.formats[index])];
            let config = LaunchConfig::new("decode_fp8", Grid::Rows(rows), &sizes);
            let mut arguments = self.arguments(&config);
            arguments.reads = addresses([operand.address, fp8.scales[index]]);
            arguments.writes = addresses([to]);
            // SAFETY: the caller's promise; the scratch memory holds both decoded operands.
            unsafe { self.launch_with(config, arguments) }?;
        }
        let decoded = |address, is_transposed| MatrixOperand { address, is_transposed, pitch: Some(pitch) };
        let plain = Product { left: decoded(left, false), right: decoded(right, true), fp8: None, ..*product };
        // SAFETY: as above.
        unsafe { self.multiply(plain) }
    }
}
