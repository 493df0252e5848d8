//! Matrix products by cuBLASLt. Its matrices are stored by columns: of ours, by rows, it sees the transposed ones, so that it is given the right factor first.

use super::NvidiaDriver;
use crate::backend::cuda::driver::{DeviceAddress, Driver as _, Epilogue, Factor, Factors, Last, Product, StreamHandle, Sums};
use crate::backend::cuda::error::CudaError;
use crate::backend::cuda::libraries::Library;
use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;
use foretell_models::EightBits;
use foretell_units::DataType;
use std::collections::HashMap;
use std::ffi::c_void;

/// Memory that an algorithm may use, as NVIDIA advises for Hopper.
const WORKSPACE: usize = 32 << 20;
/// `cublasOperation_t`, which cudarc has in another library's bindings.
const OPERATION_PLAIN: i32 = 0;
const OPERATION_TRANSPOSED: i32 = 1;
/// Beyond this alignment no algorithm asks for more.
const MOST_ALIGNED: u64 = 256;

/// The library, its memory, and what it chose for products that were made before.
pub(super) struct Products {
    handle: sys::cublasLtHandle_t,
    workspace: DeviceAddress,
    chosen: HashMap<Shape, Option<sys::cublasLtMatmulAlgo_t>>,
}

// SAFETY: the library's handle may be used from any thread, and by one at a time: it is behind a lock.
unsafe impl Send for Products {}

/// What the choice of an algorithm follows from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Shape {
    sizes: [usize; 4],
    pitches: [usize; 3],
    is_transposed: [bool; 2],
    formats: [DataType; 2],
    eight_bits: Option<([EightBits; 2], bool)>,
    accumulate: bool,
    beside: sys::cublasLtEpilogue_t,
    tf32: bool,
    alignments: [u64; 3],
}

impl Shape {
    fn of(product: &Product, beside: &Beside) -> Self {
        let aligned = |address: DeviceAddress| address.alignment(MOST_ALIGNED);
        Self {
            sizes: [product.batch, product.rows, product.columns, product.contracted],
            pitches: product.stored().map(|[.., pitch]| pitch),
            is_transposed: [product.left.is_transposed, product.right.is_transposed],
            formats: [product.input, product.output],
            eight_bits: product.factors.map(|factors| (factors.formats, factors.sums_fast)),
            accumulate: product.accumulate,
            beside: beside.kind,
            tf32: product.tf32,
            alignments: [product.right.address, product.left.address, product.result].map(aligned),
        }
    }
}

/// An epilogue as the library knows it.
struct Beside {
    kind: sys::cublasLtEpilogue_t,
    /// What it adds to columns, or where it leaves sums of a factor.
    vector: Option<DeviceAddress>,
    /// What a GELU is applied to.
    argument: Option<DeviceAddress>,
}

impl Beside {
    /// None where the library has none like it. Its own GELU is that by tanh.
    fn of(epilogue: &Epilogue) -> Option<Self> {
        use sys::cublasLtEpilogue_t as Kind;
        let Epilogue { bias, last, sums } = *epilogue;
        let argument = match last {
            Last::GeluKept(argument) | Last::GeluSlope(argument) => Some(argument),
            Last::Nothing | Last::Relu | Last::Gelu => None,
        };
        let (kind, vector) = match (bias, last, sums) {
            (None, Last::Nothing, None) => (Kind::CUBLASLT_EPILOGUE_DEFAULT, None),
            (None, Last::Relu, None) => (Kind::CUBLASLT_EPILOGUE_RELU, None),
            (None, Last::Gelu, None) => (Kind::CUBLASLT_EPILOGUE_GELU, None),
            (None, Last::GeluKept(_), None) => (Kind::CUBLASLT_EPILOGUE_GELU_AUX, None),
            (None, Last::GeluSlope(_), None) => (Kind::CUBLASLT_EPILOGUE_DGELU, None),
            (bias, Last::Nothing, None) => (Kind::CUBLASLT_EPILOGUE_BIAS, bias),
            (bias, Last::Relu, None) => (Kind::CUBLASLT_EPILOGUE_RELU_BIAS, bias),
            (bias, Last::Gelu, None) => (Kind::CUBLASLT_EPILOGUE_GELU_BIAS, bias),
            (bias, Last::GeluKept(_), None) => (Kind::CUBLASLT_EPILOGUE_GELU_AUX_BIAS, bias),
            // The library's first factor is our right one: its sums are one for each of its result's rows, our columns.
            (None, Last::Nothing, Some(Sums::OfRight(to))) => (Kind::CUBLASLT_EPILOGUE_BGRADA, Some(to)),
            (None, Last::Nothing, Some(Sums::OfLeft(to))) => (Kind::CUBLASLT_EPILOGUE_BGRADB, Some(to)),
            _ => return None,
        };
        Some(Self { kind, vector, argument })
    }

    /// Whether what it reads and writes lies as the library wants it. Epilogues read the bias by sixteen bytes, whatever the heuristics were told of
    /// the matrices (Marian's `prod.cpp`, found on an A100); rows of what a GELU is applied to begin at multiples of eight numbers
    /// (`CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD`).
    fn is_aligned(&self, product: &Product) -> bool {
        let places = self.vector.iter().chain(&self.argument).all(|address| address.0.is_multiple_of(16));
        places && (self.argument.is_none() || (product.columns.is_multiple_of(8) && product.batch == 1))
    }
}

/// Whether the library says that it has no way, and queued nothing.
fn is_refusal(error: &CublasError) -> bool {
    use sys::cublasStatus_t as Status;
    let refusals =
        [Status::CUBLAS_STATUS_NOT_SUPPORTED, Status::CUBLAS_STATUS_INVALID_VALUE, Status::CUBLAS_STATUS_ARCH_MISMATCH];
    refusals.contains(&error.0)
}

fn called<T>(result: Result<T, CublasError>) -> Result<T, CudaError> {
    result.map_err(|error| CudaError::Call { doing: "making a product", reason: format!("{:?}", error.0) })
}

fn format_of_eight_bits(format: EightBits) -> sys::cudaDataType {
    match format {
        EightBits::E4M3 => sys::cudaDataType::CUDA_R_8F_E4M3,
        EightBits::E5M2 => sys::cudaDataType::CUDA_R_8F_E5M2,
    }
}

fn format_of(data_type: DataType) -> sys::cudaDataType {
    match data_type {
        DataType::Bf16 => sys::cudaDataType::CUDA_R_16BF,
        DataType::Fp16 => sys::cudaDataType::CUDA_R_16F,
        _ => sys::cudaDataType::CUDA_R_32F,
    }
}

/// A description of the library's, given back when it goes out of scope.
struct Descriptions {
    product: sys::cublasLtMatmulDesc_t,
    layouts: Vec<sys::cublasLtMatrixLayout_t>,
}

impl Drop for Descriptions {
    fn drop(&mut self) {
        for &layout in &self.layouts {
            // SAFETY: it was made by this library, and is not used any more.
            let _ = unsafe { result::destroy_matrix_layout(layout) };
        }
        // SAFETY: as above.
        let _ = unsafe { result::destroy_matmul_desc(self.product) };
    }
}

impl Descriptions {
    fn new(product: &Product, beside: &Beside) -> Result<Self, CublasError> {
        let compute = match product.tf32 {
            true => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
            false => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
        };
        let description = result::create_matmul_desc(compute, sys::cudaDataType::CUDA_R_32F)?;
        let mut own = Self { product: description, layouts: Vec::new() };
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let operation = |factor: Factor| match factor.is_transposed {
            true => OPERATION_TRANSPOSED,
            false => OPERATION_PLAIN,
        };
        own.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &operation(product.right))?;
        own.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &operation(product.left))?;
        own.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &(beside.kind as u32))?;
        if let Some(vector) = beside.vector {
            own.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &vector.0)?;
            if product.epilogue.sums.is_some() || product.factors.is_some() {
                own.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &(format_of(product.output) as i32))?;
            }
        }
        if let Some(argument) = beside.argument {
            own.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &argument.0)?;
            own.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &(product.columns as i64))?;
            if product.factors.is_some() {
                own.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, &(format_of(product.output) as i32))?;
            }
        }
        let mut formats = [product.input; 2].map(format_of);
        if let Some(Factors { formats: eight_bits, factors: [left, right], sums_fast }) = product.factors {
            formats = eight_bits.map(format_of_eight_bits);
            own.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &right.0)?;
            own.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &left.0)?;
            own.set(Attribute::CUBLASLT_MATMUL_DESC_FAST_ACCUM, &i8::from(sums_fast))?;
        }
        let [left, right, out] = product.stored();
        for ([rows, columns, pitch], format) in [(right, formats[1]), (left, formats[0]), (out, format_of(product.output))] {
            // By rows here is by columns, and the other way round, there.
            let layout = result::create_matrix_layout(format, columns as u64, rows as u64, pitch as i64)?;
            own.layouts.push(layout);
            if product.batch > 1 {
                use sys::cublasLtMatrixLayoutAttribute_t as Attribute;
                let (count, stride) = (product.batch as i32, (rows * columns) as i64);
                // SAFETY: the attributes are numbers of these sizes.
                unsafe {
                    let attribute = Attribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT;
                    result::set_matrix_layout_attribute(layout, attribute, (&raw const count).cast(), size_of::<i32>())
                }?;
                // SAFETY: as above.
                unsafe {
                    let attribute = Attribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET;
                    result::set_matrix_layout_attribute(layout, attribute, (&raw const stride).cast(), size_of::<i64>())
                }?;
            }
        }
        Ok(own)
    }

    fn set<T>(&self, attribute: sys::cublasLtMatmulDescAttributes_t, value: &T) -> Result<(), CublasError> {
        // SAFETY: each attribute is set to a number of its own size.
        unsafe { result::set_matmul_desc_attribute(self.product, attribute, (&raw const *value).cast(), size_of::<T>()) }
    }
}

impl Products {
    pub(super) fn new(driver: &NvidiaDriver) -> Result<Self, CudaError> {
        if !Library::CublasLt.is_present() {
            return Err(CudaError::MissingLibrary { library: Library::CublasLt });
        }
        let handle = called(result::create_handle())?;
        Ok(Self { handle, workspace: driver.allocate(WORKSPACE)?, chosen: HashMap::new() })
    }

    /// Queues a product.
    ///
    /// # Safety
    /// As for [`super::Driver::multiply`].
    pub(super) unsafe fn multiply(&mut self, product: &Product, stream: StreamHandle) -> Result<(), CudaError> {
        let Product { rows, columns, contracted, .. } = *product;
        let not_supported = CudaError::ProductNotSupported { rows, columns, contracted };
        let beside = Beside::of(&product.epilogue).filter(|beside| beside.is_aligned(product));
        let Some(beside) = beside else { return Err(not_supported) };
        let shape = Shape::of(product, &beside);
        // SAFETY: the caller's promise.
        match unsafe { self.attempt(product, &beside, shape, stream) } {
            Ok(true) => Ok(()),
            Ok(false) => Err(not_supported),
            // Versions differ in when they say so of an epilogue.
            Err(error) if is_refusal(&error) && (!product.epilogue.is_plain() || product.factors.is_some()) => {
                self.chosen.insert(shape, None);
                Err(not_supported)
            }
            Err(error) => called(Err(error)),
        }
    }

    /// Whether the library has a way, which was queued then.
    unsafe fn attempt(
        &mut self,
        product: &Product,
        beside: &Beside,
        shape: Shape,
        stream: StreamHandle,
    ) -> Result<bool, CublasError> {
        let known = self.chosen.get(&shape).copied();
        if known == Some(None) {
            return Ok(false);
        }
        let descriptions = Descriptions::new(product, beside)?;
        let algorithm = match known {
            Some(known) => known,
            None => {
                let chosen = self.choose(&descriptions, &shape)?;
                self.chosen.insert(shape, chosen);
                chosen
            }
        };
        let ([right, left, out], Some(algorithm)) = (&descriptions.layouts[..], algorithm) else { return Ok(false) };
        let (alpha, beta) = (1.0_f32, if product.accumulate { 1.0_f32 } else { 0.0 });
        let pointer = |address: DeviceAddress| address.pointer().cast::<c_void>();
        let stream: sys::cudaStream_t = std::ptr::with_exposed_provenance_mut(stream.0 as usize);
        // SAFETY: the matrices are as described, which is the caller's promise; the workspace is the stream's alone.
        unsafe {
            result::matmul(
                self.handle,
                descriptions.product,
                (&raw const alpha).cast(),
                (&raw const beta).cast(),
                pointer(product.right.address),
                *right,
                pointer(product.left.address),
                *left,
                pointer(product.result),
                *out,
                pointer(product.result),
                *out,
                &algorithm,
                pointer(self.workspace),
                WORKSPACE,
                stream,
            )
        }?;
        Ok(true)
    }

    /// What the library holds to be the fastest; none where it has nothing.
    fn choose(&self, descriptions: &Descriptions, shape: &Shape) -> Result<Option<sys::cublasLtMatmulAlgo_t>, CublasError> {
        let [right, left, out] = descriptions.layouts[..] else { return Ok(None) };
        let preference = result::create_matmul_pref()?;
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let [right_aligned, left_aligned, out_aligned] = shape.alignments.map(|alignment| alignment as u32);
        let (mut set, workspace) = (Ok(()), WORKSPACE as u64);
        // SAFETY: the attribute is a number of this size.
        set = set.and(unsafe {
            let attribute = Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
            result::set_matmul_pref_attribute(preference, attribute, (&raw const workspace).cast(), size_of::<u64>())
        });
        for (attribute, aligned) in [
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, right_aligned),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, left_aligned),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, out_aligned),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, out_aligned),
        ] {
            // SAFETY: as above.
            set = set.and(unsafe {
                result::set_matmul_pref_attribute(preference, attribute, (&raw const aligned).cast(), size_of::<u32>())
            });
        }
        let chosen = set.and_then(|()| {
            // SAFETY: all descriptions are the library's own, and still there.
            unsafe { result::get_matmul_algo_heuristic(self.handle, descriptions.product, right, left, out, out, preference) }
        });
        // SAFETY: it is not used any more.
        let _ = unsafe { result::destroy_matmul_pref(preference) };
        match chosen {
            Ok(found) => Ok(Some(found.algo)),
            Err(error) if is_refusal(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }
}
