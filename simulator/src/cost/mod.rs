//! Cost models: the duration of one kernel, collective, message or copy without contention. They
//! must not know Programs, ranks or what runs at the same time.

mod communication;
mod device_kind;
mod estimate;
mod kernel_table;
mod link_efficiency;
mod model;
mod parameters;
mod profiled_gpu;
mod quantile;
mod roofline;
mod scale;
mod uncertainty;

pub(crate) use communication::{CollectiveCall, CommunicationCost};
pub(crate) use estimate::data_sheet_factor;
pub use estimate::{Estimate, KernelCost, Source};
pub use link_efficiency::LinkEfficiency;
pub use model::CostModel;
pub use parameters::{HostWaits, Parameters};
pub(crate) use profiled_gpu::ProfiledGpu;
pub use quantile::Quantile;
pub(crate) use scale::CostScale;
pub(crate) use uncertainty::Interval;
pub use uncertainty::{Residual, Uncertainty};
