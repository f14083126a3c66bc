"""Key layout of MAResU-Net's official code: the whole network, whose encoder is torchvision's ResNet-34."""

from linvit.weights.layouts.layout import Layout, count_from_zero, flat

LAYOUT = Layout(
    name="maresunet",
    marks=(r"firstconv\.weight", r"attention1\.PAM\.query_conv\.weight", r"finaldeconv1\.weight"),
    renames=(
        (r"^first(conv|bn)\.", r"backbone.\g<1>1."),
        (r"^encoder(\d)\.", r"backbone.layer\1."),
        (r"^attention(\d)\.", count_from_zero("head.skips.{}.")),
        (r"\.PAM\.(q|k|v)(?:uery|ey|alue)_conv\.", r".position_attention.\1."),
        (r"\.PAM\.", ".position_attention."),
        (r"\.CAM\.", ".channel_attention."),
        (r"\.conv1\.0\.", ".conv_in.conv."),
        (r"\.conv2P\.1\.0\.", ".position_conv.conv."),
        (r"\.conv2C\.1\.0\.", ".channel_conv.conv."),
        (r"\.conv3\.1\.0\.", ".conv_out.conv."),
        (r"^decoder(\d)\.", count_from_zero("head.decoders.{}.")),
        (r"^(head\.decoders\.\d)\.conv3\.", r"\1.conv2."),
        (r"\.deconv2\.", ".upsample."),
        (r"^finaldeconv1\.", "head.upsample."),
        (r"^finalconv2\.", "head.conv."),
        (r"^finalconv3\.", "head.classifier."),
    ),
    conversions=((r".*_conv\.weight", flat),),
)
