# fish completion of elasticjob

function __elasticjob_complete
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    set -l lines ($words[1] __complete $words[2..-1] "$current" 2>/dev/null)
    if test (count $lines) -eq 1 -a "$lines[1]" = ":0"
        __fish_complete_path "$current"
    else
        string match --invert --regex '^:' -- $lines
    end
end

complete --command elasticjob --no-files --arguments '(__elasticjob_complete)'
