"""Token streams for a study, from packaged books, pinned data sets or local files."""

from quantlab.data.manifest import MANIFESTS, Manifest, load_manifest
from quantlab.data.streams import Streams, check_data, load_streams, tokens_needed
from quantlab.data.tokenize import ByteTokenizer, Encoder, encoder_of

__all__ = [
    "MANIFESTS",
    "ByteTokenizer",
    "Encoder",
    "Manifest",
    "Streams",
    "check_data",
    "encoder_of",
    "load_manifest",
    "load_streams",
    "tokens_needed",
]
