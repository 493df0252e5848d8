//! Images: convolutions, by the library or as matrix products over the pixels under each window
//! (im2col), and pooling.

use super::dispatcher::{Dispatcher, Grid, LaunchConfig};
use super::windows::{
    BatchPart, SCRATCH_ALIGNMENT, batch_parts, column_pitch, is_pointwise, output_pixels, window_elements, window_sizes,
};
use crate::cuda::driver::{ConvolutionKind, CudaError, DeviceAddress, MatrixOperand, Product};
use foretell_models::{Kernel, Window};
use foretell_units::DataType;

impl Dispatcher<'_> {
    /// Queues a kernel of this family, or returns `false`.
    ///
    /// # Safety
    /// As for [`super::dispatch`].
    pub(super) unsafe fn image_kernel(&mut self, kernel: &Kernel) -> Result<bool, CudaError> {
        let whole = |window: &Window| window_sizes(window, BatchPart { first: 0, images: window.batch });
        // SAFETY: the caller's promise, throughout.
        unsafe {
            match *kernel {
                Kernel::Convolution(ref window) => self.convolution(window)?,
                Kernel::ConvolutionInputGradient(ref window) => self.convolution_input_gradient(window)?,
                Kernel::ConvolutionWeightGradient(ref window) => self.convolution_weight_gradient(window)?,
                Kernel::MaxPool(ref window) => {
                    let grid = Grid::Elements(window.output_elements());
                    self.launch(LaunchConfig::new("max_pool", grid, &whole(window)))?;
                }
                Kernel::MaxPoolGradient(ref window) => {
                    let (outputs, inputs) = (window.output_elements(), window.input_elements());
                    self.launch(LaunchConfig::new("check_positions", Grid::Elements(outputs), &[outputs, inputs]))?;
                    self.launch(LaunchConfig::new("max_pool_gradient", Grid::Elements(inputs), &whole(window)))?;
                }
                Kernel::GlobalAveragePool { batch, positions, channels } => {
                    let grid = Grid::Elements(batch * channels);
                    self.launch(LaunchConfig::new("global_average_pool", grid, &[batch, positions, channels]))?;
                }
                Kernel::GlobalAveragePoolGradient { batch, positions, channels } => {
                    let grid = Grid::Elements(batch * positions * channels);
                    self.launch(LaunchConfig::new("global_average_pool_gradient", grid, &[batch, positions, channels]))?;
                }
                _ => return Ok(false),
            }
        }
        Ok(true)
    }

    /// Reads x, w; writes y.
    unsafe fn convolution(&mut self, window: &Window) -> Result<(), CudaError> {
        let (x, w, y, width) = (self.read(0), self.read(1), self.written(0), self.width());
        // SAFETY: the caller's promise.
        if unsafe { self.convolve_by_library(ConvolutionKind::Forward, window, [x, w, y]) }? {
            return Ok(());
        }
        let pixels = output_pixels(window);
        for part in batch_parts(window, width, 0, self.backend.limits.max_column_bytes) {
            // SAFETY: the caller's promise.
            let columns = unsafe { self.columns(window, part, 0, x) }?;
            let sizes = [part.images * pixels, window.out_channels, window_elements(window)];
            let result = y.offset(part.first * pixels * window.out_channels * width);
            let left = MatrixOperand { pitch: Some(column_pitch(window, width)), ..MatrixOperand::plain(columns) };
            let product = self.product(sizes, left, MatrixOperand::transposed(w), result);
            // SAFETY: the caller's promise.
            unsafe { self.multiply(product) }?;
        }
        Ok(())
    }

    /// Reads dy, w; writes dx.
    unsafe fn convolution_input_gradient(&mut self, window: &Window) -> Result<(), CudaError> {
        let (dy, w, dx, width) = (self.read(0), self.read(1), self.written(0), self.width());
        // SAFETY: the caller's promise.
        if unsafe { self.convolve_by_library(ConvolutionKind::InputGradient, window, [dx, w, dy]) }? {
            return Ok(());
        }
        let pixels = output_pixels(window);
        // The contributions of windows to a pixel are summed in single precision.
        for part in batch_parts(window, size_of::<f32>(), 0, self.backend.limits.max_column_bytes) {
            let sizes = [part.images * pixels, window_elements(window), window.out_channels];
            let gradients = MatrixOperand::plain(dy.offset(part.first * pixels * window.out_channels * width));
            if is_pointwise(window) {
                let result = dx.offset(part.first * pixels * window.in_channels * width);
                let product = self.product(sizes, gradients, MatrixOperand::plain(w), result);
                // SAFETY: the caller's promise.
                unsafe { self.multiply(product) }?;
                continue;
            }
            let columns = self.scratch(part.images * pixels * window_elements(window) * size_of::<f32>())?;
            let product = self.product(sizes, gradients, MatrixOperand::plain(w), columns);
            let grid = Grid::Elements(part.images * window.height * window.width * window.in_channels);
            // SAFETY: the caller's promise; the scratch memory holds the product.
            unsafe {
                self.multiply(Product { output: DataType::Fp32, ..product })?;
                self.launch(LaunchConfig::new("window_sums", grid, &window_sizes(window, part)))?;
            }
        }
        Ok(())
    }

    /// Reads dy, x; writes dw.
    unsafe fn convolution_weight_gradient(&mut self, window: &Window) -> Result<(), CudaError> {
        let (dy, x, dw, width) = (self.read(0), self.read(1), self.written(0), self.width());
        let mut accumulate = self.call.accumulate;
        if window.batch == 0 && !accumulate {
            // SAFETY: the caller's promise.
            return unsafe { self.clear(0) };
        }
        // SAFETY: the caller's promise.
        let done = unsafe { self.weight_gradient_by_library(window, [x, dw, dy]) }?;
        accumulate |= done > 0;
        let (pixels, pitch) = (output_pixels(window), column_pitch(window, width));
        for part in batch_parts(window, width, done, self.backend.limits.max_column_bytes) {
            let sizes = [window.out_channels, pitch, part.images * pixels];
            // Padded columns give a padded gradient, which goes to scratch memory behind them.
            let column_bytes = (sizes[2] * pitch * width).next_multiple_of(SCRATCH_ALIGNMENT);
            let is_padded = pitch != window_elements(window);
            if is_padded {
                self.scratch(column_bytes + window.out_channels * pitch * size_of::<f32>())?;
            }
            // SAFETY: the caller's promise.
            let columns = unsafe { self.columns(window, part, 1, x) }?;
            let gradients = MatrixOperand::transposed(dy.offset(part.first * pixels * window.out_channels * width));
            let product = self.product(sizes, gradients, MatrixOperand::plain(columns), dw);
            let product = Product { output: DataType::Fp32, ..product };
            // SAFETY: the caller's promise; the scratch memory holds both.
            unsafe {
                if is_padded {
                    let padded = columns.offset(column_bytes);
                    self.multiply(Product { result: padded, ..product })?;
                    self.copy_rows(padded, dw, [window.out_channels, window_elements(window), pitch], accumulate)?;
                } else {
                    self.multiply(Product { accumulate, ..product })?;
                }
            }
            accumulate = true;
        }
        Ok(())
    }

    /// Returns the matrix of the pixels under each window of some images: in scratch memory, or the
    /// images themselves if windows are pointwise. The images are read `index` of the call.
    unsafe fn columns(
        &mut self,
        window: &Window,
        part: BatchPart,
        index: usize,
        x: DeviceAddress,
    ) -> Result<DeviceAddress, CudaError> {
        if is_pointwise(window) {
            return Ok(x.offset(part.first * output_pixels(window) * window.in_channels * self.width()));
        }
        let (rows, pitch) = (part.images * output_pixels(window), column_pitch(window, self.width()));
        let columns = self.scratch(rows * pitch * self.width())?;
        let mut sizes = [0; 11];
        sizes[..10].copy_from_slice(&window_sizes(window, part));
        sizes[10] = pitch;
        let config = LaunchConfig::new("window_columns", Grid::Elements(rows * window_elements(window)), &sizes);
        let mut arguments = self.arguments(&config);
        arguments.reads[0] = arguments.reads[index];
        // SAFETY: the caller's promise; the scratch memory holds the columns.
        unsafe { self.launch_with(config, arguments) }?;
        Ok(columns)
    }
}
