#compdef elasticjob
# zsh completion of elasticjob

_elasticjob() {
    local -a values shown
    local line files=1
    while IFS= read -r line; do
        case $line in
            :4) files=0 ;;
            :*) ;;
            *)
                values+=("${line%%$'\t'*}")
                shown+=("${line/$'\t'/  -- }")
                ;;
        esac
    done < <("${words[1]}" __complete "${(@)words[2,CURRENT]}" 2>/dev/null)
    if (( $#values )); then
        compadd -l -d shown -a values
    elif (( files )); then
        _files
    fi
}

if [[ "$funcstack[1]" == _elasticjob ]]; then
    _elasticjob "$@"
else
    compdef _elasticjob elasticjob
fi
