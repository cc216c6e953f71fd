"""Colours, dashes and markers that colour-blind readers can tell apart."""

# Okabe and Ito's colours without yellow, for light pages and for print; then the same
# hues, lighter, for dark pages. Slot 0 is the text.
LIGHT = (
    "#24292f",
    "#D55E00",
    "#0072B2",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#7A7A7A",
)
DARK = (
    "#e8e8e4",
    "#ff8a3d",
    "#5aaef0",
    "#2fc79c",
    "#e79bc8",
    "#f2b840",
    "#9ad4f7",
    "#a3a3a3",
)
# The page itself: what it is for, on a light and on a dark page.
_TONES = {
    "page": ("#f7f6f2", "#121417"),
    "surface": ("#ffffff", "#1a1d21"),
    "raised": ("#f1efe9", "#23272c"),
    "text": ("#22262b", "#e8e8e4"),
    "muted": ("#5a626b", "#a5adb6"),
    "line": ("#d9d6cd", "#363c43"),
    "grid": ("#ebe9e3", "#2a2f35"),
    "accent": ("#a84600", "#ff9a57"),
    "accent-soft": ("#fbe9dc", "#3a2515"),
    "good": ("#00684a", "#5fd6ae"),
    "good-soft": ("#dcf2ea", "#12352a"),
    "bad": ("#a3361f", "#ff9b85"),
    "bad-soft": ("#fbe4de", "#40201a"),
    "open": ("#4d5966", "#b4bec8"),
    "open-soft": ("#e6e9ec", "#2b3138"),
    "shadow": ("0 1px 2px rgb(30 25 15 / 6%), 0 4px 16px rgb(30 25 15 / 5%)", "none"),
}
DASHES = ("solid", "dash", "dot", "dashdot")
PRINTED_DASHES = ("-", "--", ":", "-.")
MARKERS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star")
PRINTED_MARKERS = ("o", "s", "D", "^", "x", "P", "*")


def theme_styles() -> str:
    """Write both themes as style sheet variables; `data-theme` overrules the system."""
    light = _variables(LIGHT, 0)
    dark = _variables(DARK, 1)
    slots = "".join(
        f".slot-{i}{{stroke:var(--slot-{i})}}.dot.slot-{i}{{fill:var(--slot-{i})}}"
        for i in range(len(LIGHT))
    )
    return (
        f":root{{color-scheme:light;{light}}}\n"
        "@media (prefers-color-scheme:dark){:root:not([data-theme=light])"
        f"{{color-scheme:dark;{dark}}}}}\n"
        f":root[data-theme=dark]{{color-scheme:dark;{dark}}}\n{slots}\n"
    )


def _variables(slots: tuple[str, ...], theme: int) -> str:
    tones = {name: pair[theme] for name, pair in _TONES.items()}
    tones |= {f"slot-{i}": colour for i, colour in enumerate(slots)}
    return "".join(f"--{name}:{value};" for name, value in tones.items())
