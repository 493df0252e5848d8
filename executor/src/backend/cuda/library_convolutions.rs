//! Convolutions as the library makes them: which of them it is asked for, in what memory, and what our kernels do around it. Whatever it refuses
//! is made of products over windows (`images.rs`).

use super::CudaError;
use super::convolutions::{Convolution, ConvolutionKind};
use super::driver::DeviceAddress;
use super::images::{MOST_COLUMNS, is_pointwise, pixels};
use super::queue::{Grid, Queue, Work};
use foretell_models::Window;
use foretell_units::DataType;

/// Where in scratch memory operands begin: at multiples of these bytes, as allocations do.
pub(super) const PLACES: usize = 256;
/// Numbers of single precision in the sixteen bytes at whose multiples a pixel's channels begin for tensor cores to take them. An image of three
/// channels has its weight's slope from products over windows.
const EVEN_CHANNELS: usize = 4;

/// Bytes of so many numbers in single precision, in scratch memory.
fn singles(numbers: usize) -> usize {
    (numbers * size_of::<f32>()).next_multiple_of(PLACES)
}

impl Queue<'_> {
    /// The format that the library is told of, if it is asked at all. Where a window is a pixel, images are a matrix, whose product is cuBLASLt's; and
    /// without tensor cores the library's engines have nothing over products over windows.
    fn library_format(&self, window: &Window) -> Option<DataType> {
        let format = match self.call.precision {
            DataType::Fp32 => self.tf32.then_some(DataType::Tf32),
            half => Some(half),
        };
        format.filter(|_| !is_pointwise(window) && window.input_elements() > 0 && window.output_elements() > 0)
    }

    /// Has the library make a convolution of the run's precision; whether it does. `places`: image, weight, response.
    ///
    /// # Safety
    /// As for [`Queue::enqueue`].
    pub(super) unsafe fn by_library(
        &mut self,
        kind: ConvolutionKind,
        window: &Window,
        places: [DeviceAddress; 3],
    ) -> Result<bool, CudaError> {
        let Some(format) = self.library_format(window) else { return Ok(false) };
        let [image, weight, response] = places;
        let convolution = Convolution { kind, window: *window, format, image, weight, response };
        let Some(workspace) = self.workspace_of(&convolution)? else { return Ok(false) };
        let workspace = self.scratch(workspace)?;
        // SAFETY: the caller's promise; the scratch is as large as the library said.
        unsafe { self.convolve(&convolution, workspace) }
    }

    /// Has the library make the weight's slope, in single precision, from the first images on; of how many it did. Numbers of sixteen bits are
    /// widened before: the nineteen bits that tensor cores take of single precision (tf32) hold each of them as it is, so that products are exact
    /// and sums in single precision, where the library's engines for sixteen bits round what they write to sixteen.
    ///
    /// # Safety
    /// As for [`Queue::enqueue`].
    pub(super) unsafe fn weight_gradient_by_library(
        &mut self,
        window: &Window,
        places: [DeviceAddress; 3],
    ) -> Result<usize, CudaError> {
        if self.library_format(window).is_none() || !window.in_channels.is_multiple_of(EVEN_CHANNELS) {
            return Ok(0);
        }
        let widens = self.call.precision != DataType::Fp32;
        let of_image = window.height * window.width * window.in_channels + pixels(window) * window.out_channels;
        let fitting = MOST_COLUMNS / (of_image * size_of::<f32>());
        let at_once = if widens { fitting.clamp(1, window.batch) } else { window.batch };
        for first in (0..window.batch).step_by(at_once) {
            let part = Window { batch: at_once.min(window.batch - first), ..*window };
            let accumulate = self.call.accumulate || first > 0;
            // SAFETY: the caller's promise.
            if !unsafe { self.part_of_weight_gradient(&part, first, accumulate, widens, places) }? {
                return Ok(first);
            }
        }
        Ok(window.batch)
    }

    /// The slope of some images, the first of which is named; whether the library makes it.
    unsafe fn part_of_weight_gradient(
        &mut self,
        part: &Window,
        first: usize,
        accumulate: bool,
        widens: bool,
        [x, dw, dy]: [DeviceAddress; 3],
    ) -> Result<bool, CudaError> {
        // Beside each other in scratch memory: what is widened, the slope if it is to be added, and where the library works.
        let (inputs, outputs) = (part.input_elements(), part.output_elements());
        let widened = if widens { [singles(inputs), singles(outputs)] } else { [0; 2] };
        let slope = if accumulate { singles(part.weight_elements()) } else { 0 };
        let own = widened[0] + widened[1] + slope;
        let convolution = |scratch: DeviceAddress| Convolution {
            kind: ConvolutionKind::WeightGradient,
            window: *part,
            format: DataType::Tf32,
            image: if widens { scratch } else { x },
            weight: if accumulate { scratch.after(widened[0] + widened[1]) } else { dw },
            response: if widens { scratch.after(widened[0]) } else { dy },
        };
        let scratch = self.scratch(own)?;
        let Some(workspace) = self.workspace_of(&convolution(scratch))? else { return Ok(false) };
        // Other memory it may be, and as well aligned.
        let scratch = self.scratch(own + workspace)?;
        let convolution = convolution(scratch);
        let of_part = |numbers: usize| first * (numbers / part.batch) * self.width();
        let (x, dy) = (x.after(of_part(inputs)), dy.after(of_part(outputs)));
        // SAFETY: the caller's promise; the scratch has room for all of it.
        unsafe {
            if widens {
                self.widen(x, convolution.image, inputs)?;
                self.widen(dy, convolution.response, outputs)?;
            }
            if !self.convolve(&convolution, scratch.after(own))? {
                return Ok(false);
            }
            if accumulate {
                let all = part.weight_elements();
                self.bring_rows(convolution.weight, dw, [1, all, all], true)?;
            }
        }
        Ok(true)
    }

    /// Bytes that the library works in; none where it has no way.
    fn workspace_of(&self, convolution: &Convolution) -> Result<Option<usize>, CudaError> {
        match self.backend.driver.plan_convolution(convolution) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(CudaError::ConvolutionNotSupported { .. } | CudaError::MissingLibrary { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Queues what was planned; whether the library takes it.
    unsafe fn convolve(&mut self, convolution: &Convolution, workspace: DeviceAddress) -> Result<bool, CudaError> {
        // SAFETY: the caller's promise.
        match unsafe { self.backend.driver.convolve(convolution, workspace, self.backend.stream) } {
            Ok(()) => Ok(true),
            Err(CudaError::ConvolutionNotSupported { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Numbers of the run's precision, in single precision elsewhere.
    unsafe fn widen(&mut self, from: DeviceAddress, to: DeviceAddress, numbers: usize) -> Result<(), CudaError> {
        let sizes = [numbers];
        let work = Work::new("widen_numbers", Grid::Elements(numbers.div_ceil(16 / self.width())), &sizes);
        let mut arguments = self.arguments(&work);
        (arguments.reads[0], arguments.writes[0]) = (from.0, to.0);
        // SAFETY: the caller's promise.
        unsafe { self.launch_with(work, arguments) }
    }

    /// Brings rows in single precision to where they belong, one behind the other: as they are, or to be added. So many, of so many numbers, from
    /// places so many numbers apart.
    pub(super) unsafe fn bring_rows(
        &mut self,
        from: DeviceAddress,
        to: DeviceAddress,
        sizes: [usize; 3],
        accumulate: bool,
    ) -> Result<(), CudaError> {
        let work = Work::new("bring_rows", Grid::Elements(sizes[0] * sizes[1]), &sizes);
        let mut arguments = self.arguments(&work);
        (arguments.reads[0], arguments.writes[0]) = (from.0, to.0);
        arguments.accumulate = i64::from(accumulate);
        // SAFETY: the caller's promise.
        unsafe { self.launch_with(work, arguments) }
    }
}
