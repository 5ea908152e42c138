//! The names that files of torch may use, as whole (module, name) pairs.
//!
//! Source: torch/_weights_only_unpickler.py and torch/storage.py of torch 2.15.

use crate::dtype::DType;

/// A name that only torch's files may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TorchName {
    /// `torch.FloatStorage` and others; `None` for `torch.storage.UntypedStorage`.
    Storage(Option<DType>),
    /// `_rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks[, metadata])`; `_rebuild_tensor` has the first
    /// four.
    Tensor,
    /// `_rebuild_tensor_v3(storage, offset, size, stride, requires_grad, hooks, dtype[, metadata])`.
    TensorOfDtype,
    /// `_rebuild_parameter(tensor, requires_grad, hooks)`, `_rebuild_parameter_with_state(.., state)`.
    Parameter,
    /// `_rebuild_from_type_v2(function, type, arguments, state)`: a tensor with attributes.
    FromType,
    /// A class that `_rebuild_from_type_v2` may name.
    TensorClass,
    /// `torch.Size`.
    Size,
    /// `torch.device`.
    Device,
    /// `set` and `frozenset`.
    Set,
}

/// The name that a (module, name) pair stands for.
pub fn torch_name(module: &[u8], name: &[u8]) -> Option<TorchName> {
    Some(match (module, name) {
        (b"torch", b"DoubleStorage") => TorchName::Storage(Some(DType::F64)),
        (b"torch", b"FloatStorage") => TorchName::Storage(Some(DType::F32)),
        (b"torch", b"HalfStorage") => TorchName::Storage(Some(DType::F16)),
        (b"torch", b"BFloat16Storage") => TorchName::Storage(Some(DType::BF16)),
        (b"torch", b"LongStorage") => TorchName::Storage(Some(DType::I64)),
        (b"torch", b"IntStorage") => TorchName::Storage(Some(DType::I32)),
        (b"torch", b"ShortStorage") => TorchName::Storage(Some(DType::I16)),
        (b"torch", b"CharStorage") => TorchName::Storage(Some(DType::I8)),
        (b"torch", b"ByteStorage") => TorchName::Storage(Some(DType::U8)),
        (b"torch", b"BoolStorage") => TorchName::Storage(Some(DType::Bool)),
        (b"torch.storage", b"UntypedStorage") | (b"torch", b"UntypedStorage") => TorchName::Storage(None),
        (b"torch._utils", b"_rebuild_tensor" | b"_rebuild_tensor_v2") => TorchName::Tensor,
        (b"torch._utils", b"_rebuild_tensor_v3") => TorchName::TensorOfDtype,
        (b"torch._utils", b"_rebuild_parameter" | b"_rebuild_parameter_with_state") => TorchName::Parameter,
        (b"torch._tensor", b"_rebuild_from_type_v2") => TorchName::FromType,
        (b"torch", b"Tensor") | (b"torch.nn.parameter", b"Parameter" | b"Buffer") => TorchName::TensorClass,
        (b"torch", b"Size") => TorchName::Size,
        (b"torch", b"device") => TorchName::Device,
        (b"builtins" | b"__builtin__", b"set" | b"frozenset") => TorchName::Set,
        _ => return None,
    })
}

/// Names of torch whose objects are unsupported, and which a file may contain next to others. They are not called either.
pub fn is_refused(module: &[u8], name: &[u8]) -> bool {
    matches!(
        (module, name),
        (
            b"torch._utils",
            b"_rebuild_sparse_tensor"
                | b"_rebuild_qtensor"
                | b"_rebuild_nested_tensor"
                | b"_rebuild_meta_tensor_no_storage"
                | b"_rebuild_wrapper_subclass"
                | b"_rebuild_device_tensor_from_numpy"
                | b"_rebuild_device_tensor_from_cpu_tensor"
        ) | (b"torch._tensor", b"_rebuild_from_type")
            | (
                b"torch",
                b"ComplexFloatStorage"
                    | b"ComplexDoubleStorage"
                    | b"QInt8Storage"
                    | b"QInt32Storage"
                    | b"QUInt8Storage"
                    | b"QUInt4x2Storage"
                    | b"QUInt2x4Storage"
                    | b"sparse_coo"
                    | b"sparse_csr"
                    | b"sparse_csc"
                    | b"sparse_bsr"
                    | b"sparse_bsc"
                    | b"per_tensor_affine"
                    | b"per_channel_affine"
                    | b"per_channel_affine_float_qparams"
                    | b"strided"
                    | b"jagged"
                    | b"complex32"
                    | b"complex64"
                    | b"complex128"
                    | b"qint8"
                    | b"qint32"
                    | b"quint8"
                    | b"quint4x2"
                    | b"quint2x4"
                    | b"float4_e2m1fn_x2"
            )
            | (b"torch.serialization", b"_get_layout")
            | (b"torch.distributed.tensor", b"DTensor")
            | (b"torch.distributed.tensor._dtensor_spec", b"DTensorSpec" | b"TensorMeta")
            | (b"torch.distributed.tensor.placement_types", b"Shard" | b"Replicate" | b"Partial")
            | (b"torch.distributed.device_mesh", b"DeviceMesh")
    )
}
