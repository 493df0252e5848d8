//! Layers of LSTM: launches for each position in turn.

use super::CudaError;
use super::driver::Product;
use super::products::{plain, transposed};
use super::queue::{Grid, Queue, Work};
use foretell_models::{Kernel, Recurrence};
use foretell_units::DataType;

impl Queue<'_> {
    /// Queues a kernel of this family; whether it is one.
    ///
    /// # Safety
    /// As for [`Queue::enqueue`].
    pub(super) unsafe fn recurrent_kernel(&mut self, kernel: &Kernel) -> Result<bool, CudaError> {
        // SAFETY: the caller's promise, in all that follows.
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
            // SAFETY: the caller's promise; the scratch has two states of outputs and one of cells.
            unsafe { self.launch(Work::new("lstm_position", Grid::Elements(batch * hidden * 32), &all)) }?;
        }
        Ok(())
    }

    unsafe fn lstm_gradient(&mut self, sizes: &Recurrence, outputs: bool, last: bool) -> Result<(), CudaError> {
        let Recurrence { batch, sequence, hidden, initial } = *sizes;
        self.scratch(6 * batch * hidden * size_of::<f32>())?;
        let w = usize::from(outputs) + usize::from(last);
        for position in (0..sequence).rev() {
            let all = [batch, sequence, hidden, position, 0, usize::from(outputs), w + 1, w + 2, w + 3];
            let grid = Grid::Elements(batch * hidden);
            let work = Work::new("lstm_position_gradient", grid, &all);
            let mut arguments = self.arguments(&work);
            // Below zero: there is none.
            for (place, is_there) in [(4, outputs), (5, last), (8, initial)] {
                if !is_there {
                    arguments.sizes[place] = -1;
                }
            }
            // SAFETY: the caller's promise; the scratch has the gradients of a state's outputs and cells, and of its gates.
            unsafe { self.launch_with(work, arguments) }?;
            // What comes before the first position is needed by a given state only.
            if position > 0 || initial {
                let all = [batch, sequence, hidden, position, w, usize::from(initial)];
                // SAFETY: as above.
                unsafe { self.launch(Work::new("lstm_output_gradient", grid, &all)) }?;
            }
        }
        Ok(())
    }

    /// Reads dprojected, y (, state); writes dw.
    unsafe fn lstm_weight_gradient(&mut self, sizes: &Recurrence) -> Result<(), CudaError> {
        let Recurrence { batch, sequence, hidden, initial } = *sizes;
        let before = self.scratch(sizes.output_elements() * self.width())?;
        let all = [batch, sequence, hidden, usize::from(initial)];
        let grid = Grid::Elements(sizes.output_elements());
        let product =
            self.product([4 * hidden, hidden, batch * sequence], transposed(self.read(0)), plain(before), self.written(0));
        // SAFETY: the caller's promise; the scratch is as large as the outputs.
        unsafe {
            self.launch(Work::new("lstm_outputs_before", grid, &all))?;
            self.multiply(Product { output: DataType::Fp32, accumulate: self.call.accumulate, ..product })
        }
    }
}
