//! LSTM layers: one or two launches for each position in turn.

use super::dispatcher::{Dispatcher, Grid, LaunchConfig};
use crate::cuda::driver::{CudaError, MatrixOperand, Product};
use foretell_models::{Kernel, Recurrence};
use foretell_units::DataType;

impl Dispatcher<'_> {
    /// Queues a kernel of this family, or returns `false`.
    ///
    /// # Safety
    /// As for [`super::dispatch`].
    pub(super) unsafe fn recurrent_kernel(&mut self, kernel: &Kernel) -> Result<bool, CudaError> {
        // SAFETY: the caller's promise, throughout.
        unsafe {
            match *kernel {
                Kernel::Lstm(ref sizes) => self.lstm(sizes)?,
                Kernel::LstmGradient { ref sizes, outputs, last } => self.lstm_gradient(sizes, outputs, last)?,
                Kernel::LstmWeightGradient(ref sizes) => self.lstm_weight_gradient(sizes)?,
                _ => return Ok(false),
            }
        }
        Ok(true)
    }

    unsafe fn lstm(&mut self, sizes: &Recurrence) -> Result<(), CudaError> {
        let Recurrence { batch, sequence, hidden, initial } = *sizes;
        self.scratch(3 * batch * hidden * size_of::<f32>())?;
        for position in 0..sequence {
            let all = [batch, sequence, hidden, position, usize::from(initial)];
            let grid = Grid::Elements(batch * hidden * 32);
            // SAFETY: the caller's promise; the scratch memory holds two positions' outputs and one
            // position's cells.
            unsafe { self.launch(LaunchConfig::new("lstm_position", grid, &all)) }?;
        }
        Ok(())
    }

    /// `outputs` and `last` say which gradients the call reads: of all outputs, of the last state.
    unsafe fn lstm_gradient(&mut self, sizes: &Recurrence, outputs: bool, last: bool) -> Result<(), CudaError> {
        let Recurrence { batch, sequence, hidden, initial } = *sizes;
        self.scratch(6 * batch * hidden * size_of::<f32>())?;
        let weight = usize::from(outputs) + usize::from(last);
        for position in (0..sequence).rev() {
            let all = [batch, sequence, hidden, position, 0, usize::from(outputs), weight + 1, weight + 2, weight + 3];
            let grid = Grid::Elements(batch * hidden);
            let config = LaunchConfig::new("lstm_position_gradient", grid, &all);
            let mut arguments = self.arguments(&config);
            // -1 stands for an operand that the call does not read.
            for (size, is_read) in [(4, outputs), (5, last), (8, initial)] {
                if !is_read {
                    arguments.sizes[size] = -1;
                }
            }
            // SAFETY: the caller's promise; the scratch memory holds the gradients of a position's
            // output, cell and gates.
            unsafe { self.launch_with(config, arguments) }?;
            // Before the first position there is a state only if one was given.
            if position > 0 || initial {
                let all = [batch, sequence, hidden, position, weight, usize::from(initial)];
                // SAFETY: as above.
                unsafe { self.launch(LaunchConfig::new("lstm_output_gradient", grid, &all)) }?;
            }
        }
        Ok(())
    }

    /// Reads dprojected, y (, state); writes dw.
    unsafe fn lstm_weight_gradient(&mut self, sizes: &Recurrence) -> Result<(), CudaError> {
        let Recurrence { batch, sequence, hidden, initial } = *sizes;
        let previous = self.scratch(sizes.output_elements() * self.width())?;
        let all = [batch, sequence, hidden, usize::from(initial)];
        let grid = Grid::Elements(sizes.output_elements());
        let (left, right) = (MatrixOperand::transposed(self.read(0)), MatrixOperand::plain(previous));
        let product = self.product([4 * hidden, hidden, batch * sequence], left, right, self.written(0));
        // SAFETY: the caller's promise; the scratch memory holds the outputs.
        unsafe {
            self.launch(LaunchConfig::new("lstm_previous_outputs", grid, &all))?;
            self.multiply(Product { output: DataType::Fp32, accumulate: self.call.accumulate, ..product })
        }
    }
}
