"""How torch's own operations round: tables by name, without namespace, overload and the underscore of in-place forms.

Checked against torch 2.13: every operation that its own database of test inputs offers for float64 is in one of the
tables, carries a tag that says as much, has a decomposition, or is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]


class Kind(Enum):
    """What an operation does to rounding errors; the words are the size of the disturbance before the unit roundoff."""

    ELEMENTWISE = "the magnitude of the result"
    CONTRACTION = "the same contraction of absolute values"
    REDUCTION = "the sum of absolute values"
    MOVEMENT = "nothing: values are copied, chosen or compared"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Error of a result of a mathematical library, in unit roundoffs: SLEEF, whose functions torch uses on CPUs, states at
#: most 1.0 ULP for those with the suffix u10 (https://sleef.org), and 1 ULP is at most two unit roundoffs. CUDA's
#: single-precision functions state 1 to 2 ULP, 4 for pow (CUDA C++ Programming Guide, "Mathematical Functions").
LIBRARY_ROUNDINGS = 2.0

#: Rounded once: IEEE 754-2019, section 5.4.1, and what torch computes from one of those. Norms and products are
#: sums without cancellation and chains of factors: their errors are relative to the result.
ONE_ROUNDING = _names(
    """add sub rsub mul div true_divide reciprocal sqrt square softshrink remainder
    deg2rad rad2deg native_dropout_backward linspace outer ger linalg_vector_norm norm native_norm prod cumprod
    full fill scalar_tensor full_like new_full"""
)

#: Exact where the result is below the normal range: sums are whole multiples of the smallest subnormal number
#: (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 2.2).
EXACT_WHEN_SMALL = _names(
    """add sub rsub softshrink remainder sum nansum cumsum index_add scatter_add embedding_dense_backward trace
    put index_put _unsafe_index_put _index_put_impl unfold_backward col2im"""
)

#: Sums of products of the arguments.
PRODUCTS = _names(
    """mm bmm addmm baddbmm addbmm mv addmv dot vdot addr convolution convolution_overrideable _convolution
    convolution_backward convolution_backward_overrideable _trilinear _slow_conv2d_forward _slow_conv2d_backward
    slow_conv3d_forward slow_conv_dilated2d slow_conv_dilated3d slow_conv_transpose2d slow_conv_transpose3d
    conv_tbc _embedding_bag _embedding_bag_forward_only"""
)

#: Sums, and means and interpolations with weights that are not negative.
SUMS = _names(
    """sum nansum mean cumsum index_add scatter_add scatter scatter_reduce index_reduce put index_put
    _unsafe_index_put _index_put_impl embedding_dense_backward trace
    avg_pool1d avg_pool2d avg_pool3d avg_pool2d_backward avg_pool3d_backward
    adaptive_avg_pool1d _adaptive_avg_pool2d _adaptive_avg_pool3d _adaptive_avg_pool2d_backward
    _adaptive_avg_pool3d_backward adaptive_avg_pool2d adaptive_avg_pool3d adaptive_avg_pool3d_backward
    upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_linear1d_backward
    upsample_bilinear2d_backward upsample_trilinear3d_backward upsample_nearest1d_backward
    upsample_nearest2d_backward upsample_nearest3d_backward _upsample_nearest_exact1d_backward
    _upsample_nearest_exact2d_backward _upsample_nearest_exact3d_backward max_pool2d_with_indices_backward
    max_pool3d_with_indices_backward adaptive_max_pool2d_backward adaptive_max_pool3d_backward
    unfold_backward col2im reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward
    replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward
    _embedding_bag_dense_backward"""
)

#: Copied, chosen, compared, counted, or exact by IEEE 754. Views and factories are known by their schema.
MOVEMENT = _names(
    """abs neg negative positive sign sgn signbit where masked_fill relu relu6 hardtanh hardtanh_backward threshold
    threshold_backward clamp clamp_min clamp_max clip maximum minimum fmax fmin max min amax amin aminmax
    floor ceil trunc round frac fmod copysign nan_to_num heaviside hardshrink hardshrink_backward softshrink_backward
    floor_divide nextafter frexp clone copy zero _to_copy lift lift_fresh
    gather index _unsafe_index index_select index_copy index_fill masked_select masked_scatter take embedding
    masked_scatter_backward sort topk kthvalue median nanmedian mode cummax cummin _cummax_helper _cummin_helper
    unique_dim unique_consecutive
    cat stack _stack repeat roll flip rot90 tril triu diag_embed diagonal_scatter select_scatter slice_scatter
    as_strided_scatter constant_pad_nd pixel_shuffle pixel_unshuffle channel_shuffle im2col repeat_interleave
    reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d
    select_backward slice_backward diagonal_backward block_diag _chunk_cat split_with_sizes_copy
    max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d max_unpool2d max_unpool3d
    upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d
    unsafe_split unsafe_split_with_sizes resize resize_as set _local_scalar_dense
    alias detach unfold to_padded_tensor"""
)

#: Views in all but their schema.
SHARES_MEMORY = frozenset(["_unsafe_view", "_reshape_alias", "lift", "lift_fresh", "_lazy_clone"])

#: Look at shapes only.
VALUELESS = frozenset(["empty", "is_same_size", "zero"])

#: Decompositions that write to their arguments themselves, and leave nothing to write back.
WRITES_ITSELF = _names("""native_batch_norm _native_batch_norm_legit _batch_norm_with_update cudnn_batch_norm""")
