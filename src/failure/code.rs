//! The codes of faults that commands detect themselves. Other crates' errors state their own codes.
//! The test `the_page_of_errors_lists_every_code` writes `docs/reference/errors.md` from both.

use std::fmt;

/// A stable name of a kind of fault, for programs and for the page of errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code(&'static str);

impl fmt::Display for Code {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.0)
    }
}

/// The command line does not match what `--help` describes.
pub const OPTION_USAGE: Code = Code("option::usage");
/// An option's value, or a combination of options, has no answer.
pub const OPTION_VALUE: Code = Code("option::value");
/// The command needs another option.
pub const OPTION_MISSING: Code = Code("option::missing");
/// There is no device, node, stack, file or document of this name.
pub const UNKNOWN_NAME: Code = Code("option::unknown_name");
/// The framework that a plan names could not measure or train.
pub const FRAMEWORK: Code = Code("framework::failed");
/// A file or folder cannot be read.
pub const FILE_UNREADABLE: Code = Code("file::unreadable");
/// A file or folder cannot be written.
pub const FILE_UNWRITABLE: Code = Code("file::unwritable");
/// A file does not have the expected form.
pub const FILE_FORM: Code = Code("file::form");
/// A file is of another kind than the one asked for.
pub const FILE_KIND: Code = Code("file::kind");
/// The file lies outside of the folder that a confined command may use.
pub const FILE_CONFINED: Code = Code("file::confined");
/// The plan has more ranks than there are devices.
pub const TOO_FEW_DEVICES: Code = Code("devices::too_few");
/// The plan needs more memory than a device or a host has.
pub const PLAN_TOO_LARGE: Code = Code("plan::too_large");
/// The plan's fields contradict each other or the question.
pub const PLAN_CONTRADICTION: Code = Code("plan::contradiction");
/// The plan is of another job, whose step cannot be compared.
pub const PLAN_OTHER_JOB: Code = Code("plan::other_job");
/// The topology does not state a fact that the question needs.
pub const FACT_MISSING: Code = Code("topology::fact_missing");
/// No layout was found, or the model fits on none of the devices in question.
pub const NOTHING_FITS: Code = Code("search::nothing_fits");
/// The folder has a run or job already, or another process writes there.
pub const RUN_TAKEN: Code = Code("run::taken");
/// The folder has no run, or an unfinished one.
pub const RUN_MISSING: Code = Code("run::missing");
/// A trace lacks something that the import needs, or contradicts the plan.
pub const TRACE: Code = Code("import::trace");
/// An imported file contradicts the options, or does not state what the options then must.
pub const IMPORT_OPTIONS: Code = Code("import::options");
/// The texts to tokenize are in a form that cannot be read.
pub const TEXTS: Code = Code("data::texts");
/// The tokenizer cannot encode or decode its input.
pub const TOKENIZER: Code = Code("data::tokenizer");
#[cfg(any(test, not(feature = "tokenizers")))]
/// This build of the program leaves the feature out.
pub const NOT_BUILT: Code = Code("program::not_built");
/// A program cannot be started.
pub const PROGRAM_NOT_STARTED: Code = Code("program::not_started");
/// Slurm refused a request, or a job ended in an unexpected way.
pub const SLURM: Code = Code("slurm::failed");
/// The port cannot be listened on.
pub const PORT: Code = Code("serve::port");
/// No run of a measured convergence reached the loss.
pub const CONVERGENCE: Code = Code("calibrate::convergence");
/// The machine's GPUs cannot be used in their current state.
pub const GPU: Code = Code("machine::gpu");
/// The topology describes other devices or hosts than this machine has.
pub const OTHER_MACHINE: Code = Code("machine::other");
/// The operating system, or Foretell itself, failed.
pub const SYSTEM: Code = Code("system::failed");
