//! Matrix products by cuBLASLt.
//!
//! cuBLASLt stores matrices by columns. A matrix stored by rows is, to it, the transposed one, so
//! the right operand is passed as its first matrix (A), the left one as its second (B).

use super::loader::functions;
use crate::cuda::driver::{
    BiasGradient, CudaError, DeviceAddress, Epilogue, EpilogueActivation, Fp8Scales, Library, MatrixOperand, Product,
    StreamHandle,
};
use cudarc::cublaslt::sys;
use foretell_models::EightBits;
use foretell_units::DataType;
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;

functions! {
    /// cuBLASLt's functions.
    CublasLtFunctions of Library::CublasLt, cudarc::cublaslt::sys {
        cublasLtCreate(*mut sys::cublasLtHandle_t) -> sys::cublasStatus_t;
        cublasLtMatmul(
            sys::cublasLtHandle_t, sys::cublasLtMatmulDesc_t, *const c_void, *const c_void, sys::cublasLtMatrixLayout_t,
            *const c_void, sys::cublasLtMatrixLayout_t, *const c_void, *const c_void, sys::cublasLtMatrixLayout_t, *mut c_void,
            sys::cublasLtMatrixLayout_t, *const sys::cublasLtMatmulAlgo_t, *mut c_void, usize, sys::cudaStream_t,
        ) -> sys::cublasStatus_t;
        cublasLtMatmulAlgoGetHeuristic(
            sys::cublasLtHandle_t, sys::cublasLtMatmulDesc_t, sys::cublasLtMatrixLayout_t, sys::cublasLtMatrixLayout_t,
            sys::cublasLtMatrixLayout_t, sys::cublasLtMatrixLayout_t, sys::cublasLtMatmulPreference_t, c_int,
            *mut sys::cublasLtMatmulHeuristicResult_t, *mut c_int,
        ) -> sys::cublasStatus_t;
        cublasLtMatmulDescCreate(
            *mut sys::cublasLtMatmulDesc_t, sys::cublasComputeType_t, sys::cudaDataType_t,
        ) -> sys::cublasStatus_t;
        cublasLtMatmulDescSetAttribute(
            sys::cublasLtMatmulDesc_t, sys::cublasLtMatmulDescAttributes_t, *const c_void, usize,
        ) -> sys::cublasStatus_t;
        cublasLtMatmulDescDestroy(sys::cublasLtMatmulDesc_t) -> sys::cublasStatus_t;
        cublasLtMatrixLayoutCreate(
            *mut sys::cublasLtMatrixLayout_t, sys::cudaDataType, u64, u64, i64,
        ) -> sys::cublasStatus_t;
        cublasLtMatrixLayoutSetAttribute(
            sys::cublasLtMatrixLayout_t, sys::cublasLtMatrixLayoutAttribute_t, *const c_void, usize,
        ) -> sys::cublasStatus_t;
        cublasLtMatrixLayoutDestroy(sys::cublasLtMatrixLayout_t) -> sys::cublasStatus_t;
        cublasLtMatmulPreferenceCreate(*mut sys::cublasLtMatmulPreference_t) -> sys::cublasStatus_t;
        cublasLtMatmulPreferenceSetAttribute(
            sys::cublasLtMatmulPreference_t, sys::cublasLtMatmulPreferenceAttributes_t, *const c_void, usize,
        ) -> sys::cublasStatus_t;
        cublasLtMatmulPreferenceDestroy(sys::cublasLtMatmulPreference_t) -> sys::cublasStatus_t;
    }
}

/// A status other than `CUBLAS_STATUS_SUCCESS`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CublasError(sys::cublasStatus_t);

fn checked(status: sys::cublasStatus_t) -> Result<(), CublasError> {
    if status == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS { Ok(()) } else { Err(CublasError(status)) }
}

/// Split sums of a product may be reduced in place or in the compute type (bits 0 and 1 of
/// `cublasLtReductionScheme_t`), but not in the 16-bit type of the result: on an H100 that was off
/// by more than ten units in the last place.
const PRECISE_REDUCTIONS: u32 = 3;

/// Bytes of workspace for algorithms: NVIDIA's recommendation for Hopper.
const WORKSPACE: usize = 32 << 20;
/// `cublasOperation_t`, which cudarc declares in another library's bindings.
const OPERATION_PLAIN: i32 = 0;
const OPERATION_TRANSPOSED: i32 = 1;
/// No algorithm asks for more alignment than this, in bytes.
const MAX_ALIGNMENT: u64 = 256;

/// A handle of the library, its workspace, and the algorithms that it chose.
pub(in crate::cuda) struct CublasLt {
    functions: &'static CublasLtFunctions,
    handle: sys::cublasLtHandle_t,
    workspace: DeviceAddress,
    /// The algorithm for each shape; `None` if the library has none.
    algorithms: HashMap<ProductShape, Option<sys::cublasLtMatmulAlgo_t>>,
}

// SAFETY: the library's handle may be used from any thread, by one at a time. Its owner holds it
// behind a lock.
unsafe impl Send for CublasLt {}

/// Everything that the choice of an algorithm depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct ProductShape {
    /// Batch, rows, columns, contracted.
    sizes: [usize; 4],
    pitches: [usize; 3],
    is_transposed: [bool; 2],
    /// Format of the operands and of the result.
    formats: [DataType; 2],
    /// Formats of fp8 operands, and whether fast accumulation is allowed.
    fp8: Option<([EightBits; 2], bool)>,
    accumulate: bool,
    epilogue: sys::cublasLtEpilogue_t,
    tf32: bool,
    /// Alignment in bytes of A (right), B (left) and the result.
    alignments: [u64; 3],
}

impl ProductShape {
    fn new(product: &Product, epilogue: &LibraryEpilogue) -> Self {
        let alignment = |address: DeviceAddress| address.alignment(MAX_ALIGNMENT);
        Self {
            sizes: [product.batch, product.rows, product.columns, product.contracted],
            pitches: product.stored().map(|[.., pitch]| pitch),
            is_transposed: [product.left.is_transposed, product.right.is_transposed],
            formats: [product.input, product.output],
            fp8: product.fp8.map(|fp8| (fp8.formats, fp8.fast_accumulation)),
            accumulate: product.accumulate,
            epilogue: epilogue.kind,
            tf32: product.tf32,
            alignments: [product.right.address, product.left.address, product.result].map(alignment),
        }
    }
}

/// An epilogue in the library's terms.
struct LibraryEpilogue {
    kind: sys::cublasLtEpilogue_t,
    /// The bias that is read, or the bias gradient that is written.
    bias: Option<DeviceAddress>,
    /// GELU's argument, which is written (`GELU_AUX`) or read (`DGELU`).
    auxiliary: Option<DeviceAddress>,
}

impl LibraryEpilogue {
    /// Returns the library's equivalent of an epilogue; `None` if it has none. The library's GELU
    /// is the tanh approximation.
    fn new(epilogue: &Epilogue) -> Option<Self> {
        use EpilogueActivation as Activation;
        use sys::cublasLtEpilogue_t as Kind;
        let Epilogue { bias, activation, bias_gradient } = *epilogue;
        let auxiliary = match activation {
            Activation::GeluAux(argument) | Activation::GeluGradient(argument) => Some(argument),
            Activation::None | Activation::Relu | Activation::Gelu => None,
        };
        let (kind, bias) = match (bias, activation, bias_gradient) {
            (None, Activation::None, None) => (Kind::CUBLASLT_EPILOGUE_DEFAULT, None),
            (None, Activation::Relu, None) => (Kind::CUBLASLT_EPILOGUE_RELU, None),
            (None, Activation::Gelu, None) => (Kind::CUBLASLT_EPILOGUE_GELU, None),
            (None, Activation::GeluAux(_), None) => (Kind::CUBLASLT_EPILOGUE_GELU_AUX, None),
            (None, Activation::GeluGradient(_), None) => (Kind::CUBLASLT_EPILOGUE_DGELU, None),
            (bias, Activation::None, None) => (Kind::CUBLASLT_EPILOGUE_BIAS, bias),
            (bias, Activation::Relu, None) => (Kind::CUBLASLT_EPILOGUE_RELU_BIAS, bias),
            (bias, Activation::Gelu, None) => (Kind::CUBLASLT_EPILOGUE_GELU_BIAS, bias),
            (bias, Activation::GeluAux(_), None) => (Kind::CUBLASLT_EPILOGUE_GELU_AUX_BIAS, bias),
            // A is our right operand, so its bias gradient has one sum for each of our columns.
            (None, Activation::None, Some(BiasGradient::OfRight(to))) => (Kind::CUBLASLT_EPILOGUE_BGRADA, Some(to)),
            (None, Activation::None, Some(BiasGradient::OfLeft(to))) => (Kind::CUBLASLT_EPILOGUE_BGRADB, Some(to)),
            _ => return None,
        };
        Some(Self { kind, bias, auxiliary })
    }

    /// Returns `true` if the epilogue's tensors have the alignment that the library needs.
    ///
    /// Epilogues read the bias 16 bytes at a time, regardless of the matrices' alignments that the
    /// heuristics were given (Marian's `prod.cpp` found this on an A100). Rows of the auxiliary
    /// tensor start at multiples of 8 elements (`CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD`).
    fn is_aligned(&self, product: &Product) -> bool {
        let addresses = self.bias.iter().chain(&self.auxiliary).all(|address| address.0.is_multiple_of(16));
        addresses && (self.auxiliary.is_none() || (product.columns.is_multiple_of(8) && product.batch == 1))
    }
}

/// Returns `true` if the library says that it does not support the product. It queued nothing.
fn is_refusal(error: &CublasError) -> bool {
    use sys::cublasStatus_t as Status;
    let refusals =
        [Status::CUBLAS_STATUS_NOT_SUPPORTED, Status::CUBLAS_STATUS_INVALID_VALUE, Status::CUBLAS_STATUS_ARCH_MISMATCH];
    refusals.contains(&error.0)
}

/// The error of a call that neither succeeded nor was refused.
fn failed(error: CublasError) -> CudaError {
    CudaError::Call { action: "a matrix product by cuBLASLt", reason: format!("{:?}", error.0) }
}

fn fp8_type(format: EightBits) -> sys::cudaDataType {
    match format {
        EightBits::E4M3 => sys::cudaDataType::CUDA_R_8F_E4M3,
        EightBits::E5M2 => sys::cudaDataType::CUDA_R_8F_E5M2,
    }
}

fn cuda_type(data_type: DataType) -> sys::cudaDataType {
    match data_type {
        DataType::Bf16 => sys::cudaDataType::CUDA_R_16BF,
        DataType::Fp16 => sys::cudaDataType::CUDA_R_16F,
        DataType::Fp32 | DataType::Tf32 => sys::cudaDataType::CUDA_R_32F,
        other => unreachable!("invariant: no product has operands in {other}"),
    }
}

/// The library's descriptors of one product, destroyed on drop.
struct Descriptors {
    functions: &'static CublasLtFunctions,
    product: sys::cublasLtMatmulDesc_t,
    /// Layouts of A (right), B (left) and the result.
    layouts: Vec<sys::cublasLtMatrixLayout_t>,
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        for &layout in &self.layouts {
            // SAFETY: the library created it, and nothing uses it any more.
            let _ = unsafe { (self.functions.cublasLtMatrixLayoutDestroy)(layout) };
        }
        // SAFETY: as above.
        let _ = unsafe { (self.functions.cublasLtMatmulDescDestroy)(self.product) };
    }
}

impl Descriptors {
    fn new(functions: &'static CublasLtFunctions, product: &Product, epilogue: &LibraryEpilogue) -> Result<Self, CublasError> {
        let compute = match product.tf32 {
            true => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
            false => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
        };
        let mut description = std::ptr::null_mut();
        // SAFETY: the pointer is valid.
        checked(unsafe { (functions.cublasLtMatmulDescCreate)(&mut description, compute, sys::cudaDataType::CUDA_R_32F) })?;
        let mut descriptors = Self { functions, product: description, layouts: Vec::new() };
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let operation = |operand: MatrixOperand| match operand.is_transposed {
            true => OPERATION_TRANSPOSED,
            false => OPERATION_PLAIN,
        };
        descriptors.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &operation(product.right))?;
        descriptors.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &operation(product.left))?;
        descriptors.set_epilogue(product, epilogue)?;
        let mut formats = [product.input; 2].map(cuda_type);
        if let Some(Fp8Scales { formats: fp8, scales: [left, right], fast_accumulation }) = product.fp8 {
            formats = fp8.map(fp8_type);
            descriptors.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &right.0)?;
            descriptors.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &left.0)?;
            descriptors.set(Attribute::CUBLASLT_MATMUL_DESC_FAST_ACCUM, &i8::from(fast_accumulation))?;
        }
        let [left, right, result] = product.stored();
        for (stored, format) in [(right, formats[1]), (left, formats[0]), (result, cuda_type(product.output))] {
            descriptors.add_layout(product.batch, stored, format)?;
        }
        Ok(descriptors)
    }

    fn set_epilogue(&self, product: &Product, epilogue: &LibraryEpilogue) -> Result<(), CublasError> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let output = cuda_type(product.output) as i32;
        self.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &(epilogue.kind as u32))?;
        if let Some(bias) = epilogue.bias {
            self.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias.0)?;
            if product.epilogue.bias_gradient.is_some() || product.fp8.is_some() {
                self.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &output)?;
            }
        }
        if let Some(auxiliary) = epilogue.auxiliary {
            self.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &auxiliary.0)?;
            self.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &(product.columns as i64))?;
            if product.fp8.is_some() {
                self.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, &output)?;
            }
        }
        Ok(())
    }

    fn set<T>(&self, attribute: sys::cublasLtMatmulDescAttributes_t, value: &T) -> Result<(), CublasError> {
        // SAFETY: each attribute is set to a number of its own size.
        checked(unsafe {
            let value = (&raw const *value).cast();
            (self.functions.cublasLtMatmulDescSetAttribute)(self.product, attribute, value, size_of::<T>())
        })
    }

    /// Adds the layout of a matrix with rows, columns and pitch as stored.
    fn add_layout(
        &mut self,
        batch: usize,
        [rows, columns, pitch]: [usize; 3],
        format: sys::cudaDataType,
    ) -> Result<(), CublasError> {
        // Rows and columns swap, because the library stores by columns.
        let mut layout = std::ptr::null_mut();
        // SAFETY: the pointer is valid.
        checked(unsafe {
            (self.functions.cublasLtMatrixLayoutCreate)(&mut layout, format, columns as u64, rows as u64, pitch as i64)
        })?;
        self.layouts.push(layout);
        if batch > 1 {
            use sys::cublasLtMatrixLayoutAttribute_t as Attribute;
            let (count, stride) = (batch as i32, (rows * columns) as i64);
            let set = self.functions.cublasLtMatrixLayoutSetAttribute;
            // SAFETY: the attributes are numbers of these sizes.
            checked(unsafe {
                let attribute = Attribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT;
                set(layout, attribute, (&raw const count).cast(), size_of::<i32>())
            })?;
            // SAFETY: as above.
            checked(unsafe {
                let attribute = Attribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET;
                set(layout, attribute, (&raw const stride).cast(), size_of::<i64>())
            })?;
        }
        Ok(())
    }
}

impl CublasLt {
    /// Creates a handle on the current device. `allocate` provides device memory for the
    /// workspace.
    ///
    /// # Errors
    /// [`CudaError::MissingLibrary`] if the library cannot be loaded.
    pub(in crate::cuda) fn new(allocate: impl FnOnce(usize) -> Result<DeviceAddress, CudaError>) -> Result<Self, CudaError> {
        let functions = CublasLtFunctions::get()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the pointer is valid.
        checked(unsafe { (functions.cublasLtCreate)(&mut handle) }).map_err(failed)?;
        Ok(Self { functions, handle, workspace: allocate(WORKSPACE)?, algorithms: HashMap::new() })
    }

    /// Queues a product.
    ///
    /// # Errors
    /// [`CudaError::ProductNotSupported`] if the library has no algorithm; nothing is queued.
    ///
    /// # Safety
    /// As for [`Driver::multiply`](crate::cuda::driver::Driver::multiply); the device's
    /// context is current.
    pub(in crate::cuda) unsafe fn multiply(&mut self, product: &Product, stream: StreamHandle) -> Result<(), CudaError> {
        let Product { rows, columns, contracted, .. } = *product;
        let not_supported = CudaError::ProductNotSupported { rows, columns, contracted };
        let epilogue = LibraryEpilogue::new(&product.epilogue).filter(|epilogue| epilogue.is_aligned(product));
        let Some(epilogue) = epilogue else { return Err(not_supported) };
        let shape = ProductShape::new(product, &epilogue);
        // SAFETY: the caller's promise.
        match unsafe { self.try_multiply(product, &epilogue, shape, stream) } {
            Ok(true) => Ok(()),
            Ok(false) => Err(not_supported),
            // Some versions refuse an epilogue only when the product is queued.
            Err(error) if is_refusal(&error) && (!product.epilogue.is_plain() || product.fp8.is_some()) => {
                self.algorithms.insert(shape, None);
                Err(not_supported)
            }
            Err(error) => Err(failed(error)),
        }
    }

    /// Queues a product and returns `true`; `false` if the library has no algorithm for it.
    unsafe fn try_multiply(
        &mut self,
        product: &Product,
        epilogue: &LibraryEpilogue,
        shape: ProductShape,
        stream: StreamHandle,
    ) -> Result<bool, CublasError> {
        let known = self.algorithms.get(&shape).copied();
        if known == Some(None) {
            return Ok(false);
        }
        let descriptors = Descriptors::new(self.functions, product, epilogue)?;
        let algorithm = match known {
            Some(known) => known,
            None => {
                let chosen = self.choose(&descriptors, &shape)?;
                self.algorithms.insert(shape, chosen);
                chosen
            }
        };
        let ([right, left, out], Some(algorithm)) = (&descriptors.layouts[..], algorithm) else { return Ok(false) };
        let (alpha, beta) = (1.0_f32, if product.accumulate { 1.0_f32 } else { 0.0 });
        let pointer = |address: DeviceAddress| address.pointer().cast::<c_void>();
        let stream: sys::cudaStream_t = std::ptr::with_exposed_provenance_mut(stream.0 as usize);
        // SAFETY: the matrices are as described, by the caller's promise; the workspace is used by
        // this stream alone.
        checked(unsafe {
            (self.functions.cublasLtMatmul)(
                self.handle,
                descriptors.product,
                (&raw const alpha).cast(),
                pointer(product.right.address),
                *right,
                pointer(product.left.address),
                *left,
                (&raw const beta).cast(),
                pointer(product.result),
                *out,
                pointer(product.result),
                *out,
                &algorithm,
                pointer(self.workspace),
                WORKSPACE,
                stream,
            )
        })?;
        Ok(true)
    }

    /// Returns the algorithm that the library's heuristics rank first; `None` if there is none.
    fn choose(&self, descriptors: &Descriptors, shape: &ProductShape) -> Result<Option<sys::cublasLtMatmulAlgo_t>, CublasError> {
        let mut preference = std::ptr::null_mut();
        // SAFETY: the pointer is valid.
        checked(unsafe { (self.functions.cublasLtMatmulPreferenceCreate)(&mut preference) })?;
        let chosen = self.choose_with(preference, descriptors, shape);
        // SAFETY: nothing uses it any more.
        let _ = unsafe { (self.functions.cublasLtMatmulPreferenceDestroy)(preference) };
        match chosen {
            Err(error) if is_refusal(&error) => Ok(None),
            chosen => chosen,
        }
    }

    fn choose_with(
        &self,
        preference: sys::cublasLtMatmulPreference_t,
        descriptors: &Descriptors,
        shape: &ProductShape,
    ) -> Result<Option<sys::cublasLtMatmulAlgo_t>, CublasError> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let [right, left, out] = descriptors.layouts[..] else { return Ok(None) };
        let set = self.functions.cublasLtMatmulPreferenceSetAttribute;
        let [right_alignment, left_alignment, out_alignment] = shape.alignments.map(|alignment| alignment as u32);
        let workspace = WORKSPACE as u64;
        // SAFETY: the attribute is a number of this size.
        checked(unsafe {
            let attribute = Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
            set(preference, attribute, (&raw const workspace).cast(), size_of::<u64>())
        })?;
        let reductions = PRECISE_REDUCTIONS;
        // SAFETY: as above.
        checked(unsafe {
            let attribute = Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK;
            set(preference, attribute, (&raw const reductions).cast(), size_of::<u32>())
        })?;
        for (attribute, alignment) in [
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, right_alignment),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, left_alignment),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, out_alignment),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, out_alignment),
        ] {
            // SAFETY: as above.
            checked(unsafe { set(preference, attribute, (&raw const alignment).cast(), size_of::<u32>()) })?;
        }
        let (mut found, mut count) = (MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::uninit(), 0);
        // SAFETY: all descriptors are the library's own, and alive; one result fits.
        checked(unsafe {
            (self.functions.cublasLtMatmulAlgoGetHeuristic)(
                self.handle,
                descriptors.product,
                right,
                left,
                out,
                out,
                preference,
                1,
                found.as_mut_ptr(),
                &mut count,
            )
        })?;
        if count == 0 {
            return Ok(None);
        }
        // SAFETY: the library wrote one result.
        let found = unsafe { found.assume_init() };
        checked(found.state).map(|()| Some(found.algo))
    }
}
