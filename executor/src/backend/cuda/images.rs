//! Images: convolutions by the library, or as products over the pixels under each window, and poolings.

use super::CudaError;
use super::convolutions::ConvolutionKind;
use super::driver::{DeviceAddress, Factor, Product};
use super::library_convolutions::PLACES;
use super::products::{ROW_ALIGNMENT, plain, transposed};
use super::queue::{Grid, Queue, Work};
use foretell_models::{Kernel, Window};
use foretell_units::DataType;

/// The most bytes of scratch memory that the pixels under windows may take; a larger batch is treated by parts, in tests a small one, too.
pub(super) const MOST_COLUMNS: usize = if cfg!(test) { 1 << 14 } else { 256 << 20 };

impl Queue<'_> {
    /// Queues a kernel of this family; whether it is one.
    ///
    /// # Safety
    /// As for [`Queue::enqueue`].
    pub(super) unsafe fn image_kernel(&mut self, kernel: &Kernel) -> Result<bool, CudaError> {
        // SAFETY: the caller's promise, in all that follows.
        unsafe {
            match *kernel {
                Kernel::Convolution(ref window) => self.convolution(window)?,
                Kernel::ConvolutionInputGradient(ref window) => self.convolution_input_gradient(window)?,
                Kernel::ConvolutionWeightGradient(ref window) => self.convolution_weight_gradient(window)?,
                Kernel::MaxPool(ref window) => {
                    let grid = Grid::Elements(window.output_elements());
                    self.launch(Work::new("max_pool", grid, &window_sizes(window, window.batch, 0)))?;
                }
                Kernel::MaxPoolGradient(ref window) => {
                    let (windows, pixels) = (window.output_elements(), window.input_elements());
                    self.launch(Work::new("check_places", Grid::Elements(windows), &[windows, pixels]))?;
                    let sizes = window_sizes(window, window.batch, 0);
                    self.launch(Work::new("max_pool_gradient", Grid::Elements(pixels), &sizes))?;
                }
                Kernel::GlobalAveragePool { batch, positions, channels } => {
                    let grid = Grid::Elements(batch * channels);
                    self.launch(Work::new("global_average_pool", grid, &[batch, positions, channels]))?;
                }
                Kernel::GlobalAveragePoolGradient { batch, positions, channels } => {
                    let grid = Grid::Elements(batch * positions * channels);
                    self.launch(Work::new("global_average_pool_gradient", grid, &[batch, positions, channels]))?;
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
        if unsafe { self.by_library(ConvolutionKind::Forward, window, [x, w, y]) }? {
            return Ok(());
        }
        for part in parts(window, width) {
            // SAFETY: the caller's promise.
            let columns = unsafe { self.columns(window, &part, 0, x) }?;
            let sizes = [part.images * pixels(window), window.out_channels, taps(window)];
            let result = y.after(part.first * pixels(window) * window.out_channels * width);
            let left = Factor { pitch: Some(pitch(window, width)), ..plain(columns) };
            let product = self.product(sizes, left, transposed(w), result);
            // SAFETY: the caller's promise.
            unsafe { self.multiply(product) }?;
        }
        Ok(())
    }

    /// Reads dy, w; writes dx.
    unsafe fn convolution_input_gradient(&mut self, window: &Window) -> Result<(), CudaError> {
        let (dy, w, dx, width) = (self.read(0), self.read(1), self.written(0), self.width());
        // SAFETY: the caller's promise.
        if unsafe { self.by_library(ConvolutionKind::InputGradient, window, [dx, w, dy]) }? {
            return Ok(());
        }
        // What windows say of a pixel is summed in single precision.
        for part in parts(window, size_of::<f32>()) {
            let sizes = [part.images * pixels(window), taps(window), window.out_channels];
            let slopes = plain(dy.after(part.first * pixels(window) * window.out_channels * width));
            if is_pointwise(window) {
                let result = dx.after(part.first * pixels(window) * window.in_channels * width);
                let product = self.product(sizes, slopes, plain(w), result);
                // SAFETY: the caller's promise.
                unsafe { self.multiply(product) }?;
                continue;
            }
            let columns = self.scratch(part.images * pixels(window) * taps(window) * size_of::<f32>())?;
            let product = Product { output: DataType::Fp32, ..self.product(sizes, slopes, plain(w), columns) };
            let grid = Grid::Elements(part.images * window.height * window.width * window.in_channels);
            // SAFETY: the caller's promise; the scratch is as large as the product.
            unsafe {
                self.multiply(product)?;
                self.launch(Work::new("window_sums", grid, &window_sizes(window, part.images, part.first)))?;
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
        let pitch = pitch(window, width);
        for part in parts_from(window, width, done) {
            let sizes = [window.out_channels, pitch, part.images * pixels(window)];
            // Rows that lie apart in the columns do so in the slope, which then has its place behind them.
            let behind = (sizes[2] * pitch * width).next_multiple_of(PLACES);
            let is_apart = pitch != taps(window);
            if is_apart {
                self.scratch(behind + window.out_channels * pitch * size_of::<f32>())?;
            }
            // SAFETY: the caller's promise.
            let columns = unsafe { self.columns(window, &part, 1, x) }?;
            let slopes = transposed(dy.after(part.first * pixels(window) * window.out_channels * width));
            let product = Product { output: DataType::Fp32, ..self.product(sizes, slopes, plain(columns), dw) };
            // SAFETY: the caller's promise; the scratch is as large as both.
            unsafe {
                if is_apart {
                    let slope = columns.after(behind);
                    self.multiply(Product { result: slope, ..product })?;
                    self.bring_rows(slope, dw, [window.out_channels, taps(window), pitch], accumulate)?;
                } else {
                    self.multiply(Product { accumulate, ..product })?;
                }
            }
            accumulate = true;
        }
        Ok(())
    }

    /// The pixels under each window of a part's images: in scratch memory, or the images themselves where a window is a pixel. `place`: the read that they are.
    unsafe fn columns(
        &mut self,
        window: &Window,
        part: &Part,
        place: usize,
        x: DeviceAddress,
    ) -> Result<DeviceAddress, CudaError> {
        if is_pointwise(window) {
            return Ok(x.after(part.first * pixels(window) * window.in_channels * self.width()));
        }
        let (rows, pitch) = (part.images * pixels(window), pitch(window, self.width()));
        let columns = self.scratch(rows * pitch * self.width())?;
        let mut sizes = [0; 11];
        sizes[..10].copy_from_slice(&window_sizes(window, part.images, part.first));
        sizes[10] = pitch;
        let work = Work::new("window_columns", Grid::Elements(rows * taps(window)), &sizes);
        let mut arguments = self.arguments(&work);
        arguments.reads[0] = arguments.reads[place];
        // SAFETY: the caller's promise; the scratch is as large as the columns.
        unsafe { self.launch_with(work, arguments) }?;
        Ok(columns)
    }
}

/// Images that are treated at a time.
#[derive(Clone, Copy, Debug)]
struct Part {
    first: usize,
    images: usize,
}

/// Parts of a batch of which the pixels under windows, of so many bytes each, fit into scratch memory.
fn parts(window: &Window, width: usize) -> impl Iterator<Item = Part> + use<> {
    parts_from(window, width, 0)
}

/// As above, of the images from one on.
fn parts_from(window: &Window, width: usize, first: usize) -> impl Iterator<Item = Part> + use<> {
    let (batch, of_image) = (window.batch, pixels(window) * pitch(window, width) * width);
    let at_once = if is_pointwise(window) { batch } else { MOST_COLUMNS / of_image.max(1) }.clamp(1, batch.max(1));
    (first..batch).step_by(at_once).map(move |first| Part { first, images: at_once.min(batch - first) })
}

/// Pixels of an output image.
pub(super) fn pixels(window: &Window) -> usize {
    window.out_height() * window.out_width()
}

/// Numbers under a window.
fn taps(window: &Window) -> usize {
    window.size * window.size * window.in_channels
}

/// Numbers from the columns of a window to those of the next: of as many as tensor cores want rows to be of. What lies between is not looked at, or
/// is of sums that nobody looks at. Where a window is a pixel, the images are the columns, as they are.
fn pitch(window: &Window, width: usize) -> usize {
    if is_pointwise(window) { taps(window) } else { taps(window).next_multiple_of(ROW_ALIGNMENT / width) }
}

/// Whether a window is a pixel, so that images are the matrix itself.
pub(super) fn is_pointwise(window: &Window) -> bool {
    window.size == 1 && window.stride == 1 && window.padding == 0
}

fn window_sizes(window: &Window, images: usize, first: usize) -> [usize; 10] {
    let Window { height, width, in_channels, size, stride, padding, .. } = *window;
    [images, height, width, in_channels, window.out_height(), window.out_width(), size, stride, padding, first]
}
