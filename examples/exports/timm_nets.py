"""timm's nets for images, one of each family: window, grid and linear attention, mixers, gates."""

from __future__ import annotations

from collections.abc import Iterator

from .one import Export
from .vision import pictures, settled

NAMES = (
    "beit_base_patch16_224 botnet26t_256 cait_xxs24_224 coat_lite_tiny coatnet_pico_rw_224 "
    "convit_tiny convmixer_768_32 convnextv2_atto crossvit_tiny_240 cspresnet50 davit_tiny "
    "deit3_small_patch16_224 densenet121 dla34 dpn48b eca_resnet33ts edgenext_xx_small "
    "efficientformer_l1 efficientformerv2_s0 efficientvit_b0 ese_vovnet19b_dw fastvit_t8 "
    "fbnetc_100 focalnet_tiny_srf gcvit_xxtiny gernet_s ghostnet_050 ghostnetv2_100 "
    "gmixer_12_224 hardcorenas_a hgnetv2_b0 hiera_tiny_224 hrnet_w18_small inception_next_atto "
    "inception_v4 lambda_resnet26t lcnet_050 levit_128s mambaout_femto maxvit_rmlp_pico_rw_256 "
    "mixer_s32_224 mnasnet_small mobilenetv4_conv_small mobilenetv4_hybrid_medium mobileone_s0 "
    "mobilevit_xxs mobilevitv2_050 mvitv2_tiny nest_tiny nextvit_small nfnet_l0 pit_ti_224 "
    "poolformerv2_s12 pvt_v2_b0 rdnet_tiny regnety_002 repghostnet_050 repvgg_a0 repvit_m0_9 "
    "res2net50_26w_4s resmlp_12_224 resnest14d resnetv2_50 rexnet_100 samvit_base_patch16_224 "
    "sebotnet33ts_256 selecsls42 semnasnet_075 sequencer2d_s shvit_s1 skresnet18 spnasnet_100 "
    "starnet_s1 swiftformer_xs swinv2_cr_tiny_224 tf_mixnet_s tiny_vit_5m_224 tinynet_e "
    "tnt_s_patch16_224 twins_svt_small visformer_tiny vit_srelpos_small_patch16_224 "
    "vitamin_small_224 xception41 xcit_nano_12_p16_224"
).split()


def timm_nets() -> Iterator[Export]:
    """Classifiers of 50 classes, of their own sizes of images."""
    import timm

    for name in NAMES:
        size = timm.get_pretrained_cfg(name).input_size[-1]
        make = settled(lambda name=name: timm.create_model(name, num_classes=50), size)
        axes = {"input": {0: "batch"}, "output": {0: "batch"}}
        yield Export(name, make, pictures(2, size), axes, exporters=("script",))
