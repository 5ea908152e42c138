//! `actshard.planes` as a codec of `zarrs`, which then accepts it in metadata. Chains decode it themselves.
#![allow(
    clippy::disallowed_types,
    reason = "zarrs keeps the names of each codec in such a lock, and writes none of them here"
)]

use std::borrow::Cow;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use zarrs::array::codec::api::{CodecPluginV3, CodecTraitsV3, PartialDecoderCapability, PartialEncoderCapability};
use zarrs::array::{
    ArrayBytesRaw, BytesRepresentation, BytesToBytesCodecTraits, Codec, CodecError, CodecMetadataOptions, CodecOptions,
    CodecTraits, RecommendedConcurrency,
};
use zarrs::metadata::Configuration;
use zarrs::metadata::v3::MetadataV3;
use zarrs::plugin::{PluginCreateError, ZarrVersion};

use crate::codec::planes;

/// The codec's configuration, which only its encoder needs: a block has its own.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PlanesCodec {
    /// Bytes of a value.
    typesize: usize,
    /// Values of a row.
    width: usize,
}

zarrs::plugin::impl_extension_aliases!(PlanesCodec, v3: "actshard.planes");

inventory::submit! {
    CodecPluginV3::new::<PlanesCodec>()
}

impl CodecTraitsV3 for PlanesCodec {
    fn create(metadata: &MetadataV3) -> Result<Codec, PluginCreateError> {
        let codec: PlanesCodec = metadata.to_typed_configuration()?;
        Ok(Codec::BytesToBytes(Arc::new(codec)))
    }
}

impl CodecTraits for PlanesCodec {
    fn as_any(&self) -> &dyn std::any::Any {
        self
    }

    fn configuration(&self, _: ZarrVersion, _: &CodecMetadataOptions) -> Option<Configuration> {
        let fields = serde_json::to_value(self).ok()?;
        fields.as_object().cloned().map(Configuration::from)
    }

    fn partial_decoder_capability(&self) -> PartialDecoderCapability {
        PartialDecoderCapability { partial_read: false, partial_decode: false }
    }

    fn partial_encoder_capability(&self) -> PartialEncoderCapability {
        PartialEncoderCapability { partial_encode: false }
    }
}

fn text(error: crate::Error) -> CodecError {
    CodecError::Other(error.detail)
}

impl BytesToBytesCodecTraits for PlanesCodec {
    fn into_dyn(self: Arc<Self>) -> Arc<dyn BytesToBytesCodecTraits> {
        self
    }

    fn recommended_concurrency(&self, _: &BytesRepresentation) -> Result<RecommendedConcurrency, CodecError> {
        Ok(RecommendedConcurrency::new_maximum(1))
    }

    fn encoded_representation(&self, decoded: &BytesRepresentation) -> BytesRepresentation {
        decoded.size().map_or(BytesRepresentation::UnboundedSize, |size| {
            BytesRepresentation::BoundedSize(size.saturating_add(planes::HEADER as u64))
        })
    }

    fn encode<'a>(&self, rows: ArrayBytesRaw<'a>, _: &CodecOptions) -> Result<ArrayBytesRaw<'a>, CodecError> {
        planes::encode(&rows, self.typesize, self.width).map(Cow::Owned).map_err(text)
    }

    fn decode<'a>(
        &self,
        block: ArrayBytesRaw<'a>,
        decoded: &BytesRepresentation,
        _: &CodecOptions,
    ) -> Result<ArrayBytesRaw<'a>, CodecError> {
        planes::decode(&block, decoded.size().unwrap_or(u64::MAX)).map(Cow::Owned).map_err(text)
    }
}
