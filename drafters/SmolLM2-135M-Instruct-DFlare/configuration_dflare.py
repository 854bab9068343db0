"""Configuration of a DFlare drafter: that of a DFlash drafter, and how layers read the target (arXiv 2606.02091, section 4)."""

from typing import ClassVar

from .configuration_dflash import DFlashConfig

# AngelSlim's checkpoints carry this name; where they list no taps, they have one per draft layer.
ANGELSLIM_ARCHITECTURE = "QwenDFlareDraftModel"
DEFAULT_NUM_TAPS = 9


class DFlareConfig(DFlashConfig):
    """A DFlash configuration with a context for every draft layer, and the switches of the paper's ablations (table 2).

    The published layout (a flat Qwen3 config with a nested `dflash_config`) loads as it is. With `fusion="fc"` and
    `separate_kv=False` the drafter is a DFlash drafter.

    Args:
        fusion: how the contexts are made of the taps. "softmax": for each layer a weighted sum, the weights a softmax
            (eq. 3). "linear": the same without the softmax ("- Softmax"). "fc": DFlash's, one linear map of all taps side by
            side for all layers (eq. 1).
        fusion_norm: "shared" normalises the contexts of all layers with the same weights, "per_layer" with a layer's own.
        fusion_fc: whether one linear map, the same for all layers, stands between weighted sum and norm ("++ FC").
        separate_kv: whether context and block have key and value projections of their own (eq. 4); if not, they share
            them as in DFlash ("- KVProj").
        num_target_layers: depth of the target. By default 9 of its layers are tapped, evenly from the second to the
            third-to-last.
        **kwargs: as for [`DFlashConfig`].
    """

    model_type = "dflare"
    drafter_kind: ClassVar[str] = "dflare"

    num_hidden_layers: int = 7
    fusion: str = "softmax"
    fusion_norm: str = "shared"
    fusion_fc: bool = False
    separate_kv: bool = True

    def default_num_taps(self) -> int:
        """How many target layers to tap where none are named."""
        return self.num_hidden_layers if ANGELSLIM_ARCHITECTURE in (self.architectures or []) else DEFAULT_NUM_TAPS
