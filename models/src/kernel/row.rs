//! The form of the list of kernels: one row for each, so that a variant and its description stand
//! side by side.

/// Declares [`Kernel`](super::Kernel) with one row for each kernel: its variant, and its
/// description from the sizes of the variant.
macro_rules! kernels {
    (
        $(#[$attribute:meta])*
        pub enum Kernel {
            $(
                $(#[$variant_attribute:meta])*
                $variant:ident
                $(($sizes:ident: $sizes_type:ty))?
                $({ $($(#[$field_attribute:meta])* $field:ident: $field_type:ty),+ $(,)? })?
                => $spec:expr;
            )+
        }
    ) => {
        $(#[$attribute])*
        pub enum Kernel {
            $(
                $(#[$variant_attribute])*
                $variant $(($sizes_type))? $({ $($(#[$field_attribute])* $field: $field_type),+ })?,
            )+
        }

        impl Kernel {
            /// Returns what `fact` finds in the kernel's description.
            ///
            /// Each arm calls `fact`, so that the optimiser reduces the arm to the arithmetic of
            /// that fact. A description is large, and building all of it takes ten times as long.
            /// `fact` must be inlined everywhere: a short closure, or a function that says so.
            #[inline(always)]
            #[allow(unused_variables, reason = "few descriptions need all sizes")]
            fn describe<Fact>(&self, fact: impl Fn(&KernelSpec) -> Fact) -> Fact {
                match *self {
                    $(Kernel::$variant $(($sizes))? $({ $($field),+ })? => fact(&$spec),)+
                }
            }
        }
    };
}
