//! Convolutions by cuDNN ("the library"): when to use it, its scratch memory, and the kernels
//! around it. A convolution that it refuses becomes matrix products over windows (`images.rs`).

use super::dispatcher::{Dispatcher, Grid, LaunchConfig};
use super::windows::{SCRATCH_ALIGNMENT, is_pointwise, output_pixels};
use crate::cuda::driver::{Convolution, ConvolutionKind, CudaError, DeviceAddress};
use foretell_models::Window;
use foretell_units::DataType;

/// Tensor cores read single precision only if each pixel's channels start at a multiple of 16
/// bytes, so the number of channels must be a multiple of this. Otherwise, as for images of three
/// channels, the weight gradient comes from matrix products over windows.
const CHANNEL_MULTIPLE: usize = 4;

/// Returns the bytes of a single-precision tensor in scratch memory.
fn single_bytes(elements: usize) -> usize {
    (elements * size_of::<f32>()).next_multiple_of(SCRATCH_ALIGNMENT)
}

impl Dispatcher<'_> {
    /// Returns the format to ask the library for; `None` if it is not asked. Pointwise windows are
    /// a matrix product, which is cuBLASLt's. In fp32, without tensor cores, the library's engines
    /// have no advantage over matrix products.
    fn library_format(&self, window: &Window) -> Option<DataType> {
        let format = match self.call.precision {
            DataType::Fp32 => self.tf32.then_some(DataType::Tf32),
            half => Some(half),
        };
        format.filter(|_| !is_pointwise(window) && window.input_elements() > 0 && window.output_elements() > 0)
    }

    /// Queues a convolution by the library; returns `false` if the library does not support it.
    /// `addresses`: image, weight, output.
    ///
    /// # Safety
    /// As for [`super::dispatch`].
    pub(super) unsafe fn convolve_by_library(
        &mut self,
        kind: ConvolutionKind,
        window: &Window,
        addresses: [DeviceAddress; 3],
    ) -> Result<bool, CudaError> {
        let Some(format) = self.library_format(window) else { return Ok(false) };
        let [image, weight, output] = addresses;
        let convolution = Convolution { kind, window: *window, format, image, weight, output };
        let Some(workspace) = self.workspace_bytes(&convolution)? else { return Ok(false) };
        let workspace = self.scratch(workspace)?;
        // SAFETY: the caller's promise; the scratch memory has the size that the library asks for.
        unsafe { self.convolve(&convolution, workspace) }
    }

    /// Queues the weight gradient by the library, in single precision. Returns how many images of
    /// the batch the queued work covers, counted from the first; the caller adds the rest.
    /// `addresses`: image, weight, output.
    ///
    /// 16-bit numbers are first widened to single precision. Tf32, the 19 bits that tensor cores
    /// read, holds each of them exactly, and the sum is in single precision; the library's 16-bit
    /// engines would round the result to 16 bits.
    ///
    /// # Safety
    /// As for [`super::dispatch`].
    pub(super) unsafe fn weight_gradient_by_library(
        &mut self,
        window: &Window,
        addresses: [DeviceAddress; 3],
    ) -> Result<usize, CudaError> {
        if self.library_format(window).is_none() || !window.in_channels.is_multiple_of(CHANNEL_MULTIPLE) {
            return Ok(0);
        }
        let widens = self.call.precision != DataType::Fp32;
        let image_elements = window.height * window.width * window.in_channels + output_pixels(window) * window.out_channels;
        let fitting = self.backend.limits.max_column_bytes / (image_elements * size_of::<f32>());
        let part_images = if widens { fitting.clamp(1, window.batch) } else { window.batch };
        for first in (0..window.batch).step_by(part_images) {
            let part = Window { batch: part_images.min(window.batch - first), ..*window };
            let accumulate = self.call.accumulate || first > 0;
            // SAFETY: the caller's promise.
            if !unsafe { self.part_of_weight_gradient(&part, first, accumulate, widens, addresses) }? {
                return Ok(first);
            }
        }
        Ok(window.batch)
    }

    /// Queues the weight gradient of some images, from image `first`; returns `false` if the
    /// library does not support it.
    unsafe fn part_of_weight_gradient(
        &mut self,
        part: &Window,
        first: usize,
        accumulate: bool,
        widens: bool,
        [x, dw, dy]: [DeviceAddress; 3],
    ) -> Result<bool, CudaError> {
        // Scratch memory holds, in this order: the widened operands, the gradient if it has to be
        // added to dw, and the library's workspace.
        let (inputs, outputs) = (part.input_elements(), part.output_elements());
        let [wide_input, wide_output] = if widens { [inputs, outputs].map(single_bytes) } else { [0; 2] };
        let gradient = if accumulate { single_bytes(part.weight_elements()) } else { 0 };
        let before_workspace = wide_input + wide_output + gradient;
        let convolution = |scratch: DeviceAddress| Convolution {
            kind: ConvolutionKind::WeightGradient,
            window: *part,
            format: DataType::Tf32,
            image: if widens { scratch } else { x },
            weight: if accumulate { scratch.offset(wide_input + wide_output) } else { dw },
            output: if widens { scratch.offset(wide_input) } else { dy },
        };
        let scratch = self.scratch(before_workspace)?;
        let Some(workspace) = self.workspace_bytes(&convolution(scratch))? else { return Ok(false) };
        // Growing may move the scratch memory. Its alignment, and with it the plan, stays the same.
        let scratch = self.scratch(before_workspace + workspace)?;
        let convolution = convolution(scratch);
        let part_offset = |elements: usize| first * (elements / part.batch) * self.width();
        let (x, dy) = (x.offset(part_offset(inputs)), dy.offset(part_offset(outputs)));
        // SAFETY: the caller's promise; the scratch memory holds all of it.
        unsafe {
            if widens {
                self.widen(x, convolution.image, inputs)?;
                self.widen(dy, convolution.output, outputs)?;
            }
            if !self.convolve(&convolution, scratch.offset(before_workspace))? {
                return Ok(false);
            }
            if accumulate {
                let elements = part.weight_elements();
                self.copy_rows(convolution.weight, dw, [1, elements, elements], true)?;
            }
        }
        Ok(true)
    }

    /// Returns the bytes of workspace that the library needs; `None` if it does not support the
    /// convolution.
    fn workspace_bytes(&self, convolution: &Convolution) -> Result<Option<usize>, CudaError> {
        match self.backend.driver.plan_convolution(convolution) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(CudaError::ConvolutionNotSupported { .. } | CudaError::MissingLibrary { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Queues a planned convolution; returns `false` if the library refuses it after all.
    unsafe fn convolve(&mut self, convolution: &Convolution, workspace: DeviceAddress) -> Result<bool, CudaError> {
        // SAFETY: the caller's promise.
        match unsafe { self.backend.driver.convolve(convolution, workspace, self.backend.stream) } {
            Ok(()) => Ok(true),
            Err(CudaError::ConvolutionNotSupported { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Queues a copy of elements from the run's precision to single precision.
    unsafe fn widen(&mut self, from: DeviceAddress, to: DeviceAddress, elements: usize) -> Result<(), CudaError> {
        let sizes = [elements];
        let grid = Grid::Elements(elements.div_ceil(16 / self.width()));
        // SAFETY: the caller's promise.
        unsafe { self.launch_between(LaunchConfig::new("widen_elements", grid, &sizes), from, to) }
    }

    /// Queues a copy of single-precision rows to contiguous rows, which overwrites or adds.
    /// `sizes`: rows, elements of a row, elements from one row of the source to the next.
    pub(super) unsafe fn copy_rows(
        &mut self,
        from: DeviceAddress,
        to: DeviceAddress,
        sizes: [usize; 3],
        accumulate: bool,
    ) -> Result<(), CudaError> {
        let config = LaunchConfig::new("copy_rows", Grid::Elements(sizes[0] * sizes[1]), &sizes);
        let mut arguments = self.arguments(&config);
        (arguments.reads[0], arguments.writes[0]) = (from.0, to.0);
        arguments.accumulate = i64::from(accumulate);
        // SAFETY: the caller's promise.
        unsafe { self.launch_with(config, arguments) }
    }
}
