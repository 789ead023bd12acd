# bash completion of elasticjob

_elasticjob_complete() {
    local line
    COMPREPLY=()
    while IFS= read -r line; do
        case $line in
            :4) compopt +o default 2>/dev/null ;;
            :*) ;;
            *) COMPREPLY+=("${line%%$'\t'*}") ;;
        esac
    done < <("${COMP_WORDS[0]}" __complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
}

complete -o default -F _elasticjob_complete elasticjob
