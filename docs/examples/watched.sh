#!/bin/bash
# Draw docs/top.png: what a terminal of tmux shows of `synkhronos top`, while profiled.py trains longer.
# In the folder of the source: docs/examples/watched.sh. It takes tmux, rich and Chromium.
set -e
folder=$(mktemp -d)
sed 's/range(20)/range(1500)/' docs/examples/profiled.py > "$folder/profiled.py"
python "$folder/profiled.py" > /dev/null &
until synkhronos top --once > /dev/null 2>&1; do sleep 0.5; done
sleep 4
tmux -L watched new-session -d -x 108 -y 6 "COLORTERM=truecolor synkhronos top --interval 2"
sleep 6
tmux -L watched capture-pane -e -p > "$folder/shown"
tmux -L watched send-keys q
python - "$folder" <<'END'
import io, sys
from rich.console import Console
from rich.text import Text
folder = sys.argv[1]
console = Console(record=True, width=108, file=io.StringIO(), force_terminal=True, color_system="truecolor")
console.print(Text.from_ansi(open(f"{folder}/shown").read().rstrip("\n")))
svg = console.export_svg(title="synkhronos top")
open(f"{folder}/page.html", "w").write(f"<style>body {{ margin: 0 }} svg {{ width: 1000px }}</style>{svg}")
END
chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=1000,148 \
    --screenshot=docs/top.png "file://$folder/page.html" > /dev/null 2>&1
wait
rm -r "$folder"
