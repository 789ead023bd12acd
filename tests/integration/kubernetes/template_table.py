"""Pod templates that the API server accepts, and others with one fault each."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

_PORT_80 = {"containerPort": 80}
_DATA = {"name": "data", "emptyDir": {}}
_ON_DATA = {"name": "data", "mountPath": "/data"}
_WITH_DATA: Json = {"volumes": [_DATA]}
_INIT = {"name": "fetch", "image": "fetch:1"}


def pod(**spec: Any) -> Json:
    """Return a case of fields of the pod's spec."""
    return {"spec": spec}


def trainer(**fields: Any) -> Json:
    """Return a case of fields of the trainer container, without a volume to mount."""
    return {"trainer": fields}


def both(spec: Json, fields: Json) -> Json:
    return {"spec": spec, "trainer": fields}


def env(*variables: Json) -> Json:
    return trainer(env=list(variables))


def source(**kinds: Any) -> Json:
    """Return a case of a variable's source."""
    return env({"name": "A", "valueFrom": kinds})


def volume(**kinds: Any) -> Json:
    return pod(volumes=[{"name": "data", **kinds}])


def amounts(limits: Json | None = None, requests: Json | None = None, **rest: Any) -> Json:
    given = {"limits": limits, "requests": requests, **rest}
    return trainer(resources={name: value for name, value in given.items() if value is not None})


def init(**fields: Any) -> Json:
    return pod(initContainers=[_INIT | fields])


def node_affinity(*expressions: Json) -> Json:
    terms = [{"matchExpressions": list(expressions)}]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    return pod(affinity={"nodeAffinity": required})


def spread(**fields: Any) -> Json:
    whole = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
    return pod(topologySpreadConstraints=[whole | fields])


def probe(**fields: Any) -> Json:
    return trainer(livenessProbe=fields)


def claim(**fields: Any) -> Json:
    whole = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    return volume(ephemeral={"volumeClaimTemplate": {"spec": whole | fields}})


HTTP = {"path": "/", "port": 80}
CASES: dict[str, Json] = {
    # accepted
    "plain": pod(),
    "variables": env({"name": "A", "value": "1"}, {"name": "B", "value": "$(A)"}, {"name": "C"}),
    "odd variable name": env({"name": "a.b-c d", "value": "1"}),
    "sources": env(
        {"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['a/b']"}}},
        {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k.1"}}},
        {"name": "C", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}},
        {"name": "D", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    ),
    "envFrom": trainer(envFrom=[{"prefix": "P_", "configMapRef": {"name": "c"}}]),
    "mount": both(_WITH_DATA, {"volumeMounts": [_ON_DATA]}),
    "volume without source": volume(),
    "volume with null source": volume(emptyDir=None),
    "amounts": amounts({"cpu": 2, "memory": "1Gi", "nvidia.com/gpu": "1"}, {"cpu": "500m"}),
    "exponents": amounts({"memory": "1e9", "cpu": ".5"}),
    "request of one that may exceed": amounts(None, {"memory": "1Gi"}),
    "huge pages": amounts({"hugepages-2Mi": "4Mi", "memory": "1Gi"}),
    "claim of devices": both(
        {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "t"}]},
        {"resources": {"claims": [{"name": "gpu"}]}},
    ),
    "empty enumerations": both({"dnsPolicy": ""}, {"imagePullPolicy": ""}),
    "tolerations": pod(
        tolerations=[
            {"operator": "Exists"},
            {"key": "gpu", "value": "x", "effect": "NoSchedule"},
            {"key": "a/b", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5},
        ]
    ),
    "node affinity": node_affinity({"key": "zone", "operator": "In", "values": ["a"]}),
    "pod anti-affinity": pod(
        affinity={
            "podAntiAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution": [
                    {"weight": 1, "podAffinityTerm": {"topologyKey": "kubernetes.io/hostname"}}
                ]
            }
        }
    ),
    "topology spread": spread(minDomains=2, labelSelector={"matchLabels": {"a": "b"}}),
    "probe": probe(httpGet=HTTP, periodSeconds=5),
    "probe with a named port": both(
        {}, {"ports": [_PORT_80 | {"name": "web"}], "livenessProbe": {"tcpSocket": {"port": "web"}}}
    ),
    "two protocols of one port": trainer(ports=[_PORT_80, _PORT_80 | {"protocol": "UDP"}]),
    "native sidecar": init(restartPolicy="Always", readinessProbe={"exec": {"command": ["true"]}}),
    "projected": pod(
        serviceAccountName="trainer",
        volumes=[
            {
                "name": "data",
                "projected": {
                    "sources": [
                        {"secret": {"name": "s", "items": [{"key": "k", "path": "p"}]}},
                        {"serviceAccountToken": {"path": "token"}},
                        {
                            "downwardAPI": {
                                "items": [
                                    {"path": "l", "fieldRef": {"fieldPath": "metadata.labels"}}
                                ]
                            }
                        },
                    ]
                },
            }
        ],
    ),
    "claim template": claim(storageClassName="fast"),
    "template metadata": {"metadata": {"labels": {"a/b": "c"}, "annotations": {"a/B": "any text"}}},
    "name and time in metadata": {"metadata": {"name": "x", "creationTimestamp": None}},
    "nulls": both({"nodeSelector": None, "tolerations": None}, {"env": None, "resources": None}),
    "whole number as a float": trainer(ports=[{"containerPort": 80.0}]),
    "security": both(
        {
            "securityContext": {
                "fsGroup": 5,
                "sysctls": [{"name": "net.core.somaxconn", "value": "1"}],
            }
        },
        {"securityContext": {"capabilities": {"add": ["IPC_LOCK"]}, "runAsUser": 0}},
    ),
    "host network": both({"hostNetwork": True}, {"ports": [_PORT_80]}),
    "own name servers": pod(dnsPolicy="None", dnsConfig={"nameservers": ["10.0.0.1"]}),
    "sleep before the end": trainer(lifecycle={"preStop": {"sleep": {"seconds": 5}}}),
    # unknown fields and types
    "misspelt field of the pod": pod(hostNetwrok=True),
    "misspelt field of a container": trainer(imagePullPolice="Always"),
    "misplaced field": trainer(nodeSelector={"a": "b"}),
    "ephemeral containers": pod(ephemeralContainers=[]),
    "unknown field deep inside": probe(httpGet={**HTTP, "pth": "/"}),
    "unknown field of metadata": {"metadata": {"label": {"a": "b"}}},
    "boolean in quotes": pod(hostNetwork="true"),
    "number as text": pod(priority="high"),
    "text as number": pod(nodeName=5),
    "mapping instead of list": trainer(ports=_PORT_80),
    "list instead of mapping": pod(nodeSelector=["a"]),
    "null in a list": pod(tolerations=[None]),
    "fraction of a processor as a number": amounts({"cpu": 0.5}),
    "integer out of range": trainer(ports=[{"containerPort": 2**31}]),
    "value of a variable as a number": env({"name": "A", "value": 1}),
    "number of a label": {"metadata": {"labels": {"a": 1}}},
    "unknown pull policy": trainer(imagePullPolicy="Alway"),
    "unknown effect": pod(tolerations=[{"key": "a", "effect": "NoStart"}]),
    "quantity with a space": amounts({"cpu": "1 core"}),
    "quantity with an unknown unit": amounts({"memory": "4GB"}),
    "no port number": trainer(ports=[{"name": "web"}]),
    "no operator": node_affinity({"key": "zone"}),
    # duplicates
    "variable twice": env({"name": "A", "value": "1"}, {"name": "A", "value": "2"}),
    "volume twice": pod(volumes=[_DATA, _DATA]),
    "mount path twice": both(_WITH_DATA, {"volumeMounts": [_ON_DATA, _ON_DATA]}),
    "port twice": trainer(ports=[_PORT_80, _PORT_80 | {"protocol": "TCP"}]),
    "port name twice": trainer(
        ports=[_PORT_80 | {"name": "a"}, {"containerPort": 81, "name": "a"}]
    ),
    "host port twice": both(
        {
            "containers": [
                {"name": "b", "image": "b", "ports": [{"containerPort": 1, "hostPort": 9}]}
            ]
        },
        {"ports": [{"containerPort": 2, "hostPort": 9}]},
    ),
    "claim name twice": pod(
        resourceClaims=[
            {"name": "a", "resourceClaimName": "b"},
            {"name": "a", "resourceClaimName": "c"},
        ]
    ),
    # names and references
    "no image": trainer(image=None),
    "empty image": trainer(image=""),
    "image with a space": trainer(image="trainer:1 "),
    "init container without an image": init(image=None),
    "mount without a volume": trainer(volumeMounts=[_ON_DATA]),
    "mount without a path": both(_WITH_DATA, {"volumeMounts": [_ON_DATA | {"mountPath": ""}]}),
    "mount above its volume": both(
        _WITH_DATA, {"volumeMounts": [_ON_DATA | {"subPathExpr": "/x"}]}
    ),
    "device of a folder": both(
        _WITH_DATA, {"volumeDevices": [{"name": "data", "devicePath": "/dev/x"}]}
    ),
    "bidirectional mount": both(
        _WITH_DATA, {"volumeMounts": [_ON_DATA | {"mountPropagation": "Bidirectional"}]}
    ),
    "volume name in capitals": pod(volumes=[_DATA | {"name": "Data"}]),
    "long port name": trainer(ports=[_PORT_80 | {"name": "metrics-and-status"}]),
    "port name of digits": trainer(ports=[_PORT_80 | {"name": "80"}]),
    "port zero": trainer(ports=[{"containerPort": 0}]),
    "port too high": trainer(ports=[{"containerPort": 70000}]),
    "variable name with =": env({"name": "A=B", "value": "1"}),
    "source and value": env(
        {"name": "A", "value": "1", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    ),
    "source without a kind": source(),
    "two sources": source(
        fieldRef={"fieldPath": "metadata.name"}, secretKeyRef={"name": "s", "key": "k"}
    ),
    "unknown field path": source(fieldRef={"fieldPath": "spec.podIP"}),
    "unknown resource": source(resourceFieldRef={"resource": "limits.gpu"}),
    "divisor": source(resourceFieldRef={"resource": "limits.cpu", "divisor": "2"}),
    "key with a slash": source(secretKeyRef={"name": "s", "key": "a/b"}),
    "secret in capitals": source(secretKeyRef={"name": "Secret", "key": "a"}),
    "envFrom of nothing": trainer(envFrom=[{"prefix": "A"}]),
    "envFrom without a name": trainer(envFrom=[{"secretRef": {}}]),
    "service account in capitals": pod(serviceAccountName="Trainer"),
    "node selector with a space": pod(nodeSelector={"zone": "a b"}),
    "label too long": {"metadata": {"labels": {"a": "x" * 64}}},
    "label key with two slashes": {"metadata": {"labels": {"a/b/c": "x"}}},
    "annotation key": {"metadata": {"annotations": {"a b": "x"}}},
    "host alias": pod(hostAliases=[{"ip": "300.0.0.1", "hostnames": ["a"]}]),
    "no name server": pod(dnsPolicy="None"),
    # amounts
    "request above limit": amounts({"cpu": 1}, {"cpu": 2}),
    "request above limit in other units": amounts({"memory": "1G"}, {"memory": "1Gi"}),
    "negative amount": amounts({"cpu": "-1"}),
    "unknown amount": amounts({"gpu": 1}),
    "half a GPU": amounts({"nvidia.com/gpu": "500m"}),
    "GPU request without a limit": amounts(None, {"nvidia.com/gpu": 1}),
    "GPU request below its limit": amounts({"nvidia.com/gpu": 2}, {"nvidia.com/gpu": 1}),
    "huge pages alone": amounts({"hugepages-2Mi": "4Mi"}),
    "claim of unknown devices": amounts(None, None, claims=[{"name": "gpu"}]),
    "storage of a pod": pod(resources={"limits": {"ephemeral-storage": "1Gi"}}),
    # volumes
    "two kinds of volume": volume(emptyDir={}, hostPath={"path": "/data"}),
    "three kinds of volume": volume(
        configMap={"name": "a"}, secret={"secretName": "b"}, emptyDir={}
    ),
    "claim without a name": volume(persistentVolumeClaim={"claimName": ""}),
    "Secret without a name": volume(secret={}),
    "config map without a name": volume(configMap={}),
    "config map by the name of a Secret's field": volume(configMap={"secretName": "a"}),
    "mode": volume(configMap={"name": "a", "defaultMode": 511 + 1}),
    "item with steps back": volume(
        configMap={"name": "a", "items": [{"key": "k", "path": "../p"}]}
    ),
    "relative export": volume(nfs={"server": "s", "path": "data"}),
    "host path with steps back": volume(hostPath={"path": "/a/../b"}),
    "unknown type of host path": volume(hostPath={"path": "/a", "type": "Folder"}),
    "driver": volume(csi={"driver": "a b"}),
    "claim template without a size": claim(resources={}),
    "claim template without a mode": claim(accessModes=[]),
    "claim template with a name": volume(
        ephemeral={
            "volumeClaimTemplate": {
                "metadata": {"name": "x"},
                "spec": {
                    "accessModes": ["ReadWriteOnce"],
                    "resources": {"requests": {"storage": "1Gi"}},
                },
            }
        }
    ),
    "projection of two kinds": volume(
        projected={"sources": [{"secret": {"name": "a"}, "configMap": {"name": "b"}}]}
    ),
    "size of a folder": volume(emptyDir={"sizeLimit": "-1Gi"}),
    # probes and life cycle
    "probe without an action": probe(periodSeconds=5),
    "probe with two actions": probe(httpGet=HTTP, exec={"command": ["true"]}),
    "probe of nothing": probe(exec={}),
    "probe without a port": probe(httpGet={"path": "/"}),
    "probe of a port name in capitals": probe(tcpSocket={"port": "WEB"}),
    "negative period": probe(httpGet=HTTP, periodSeconds=-1),
    "two successes of a liveness probe": probe(httpGet=HTTP, successThreshold=2),
    "grace of a readiness probe": trainer(
        readinessProbe={"httpGet": HTTP, "terminationGracePeriodSeconds": 5}
    ),
    "sleep longer than the grace period": trainer(
        lifecycle={"preStop": {"sleep": {"seconds": 999}}}
    ),
    "hook without an action": trainer(lifecycle={"postStart": {}}),
    "probe of an init container": init(readinessProbe={"exec": {"command": ["true"]}}),
    "life cycle of an init container": init(lifecycle={"preStop": {"exec": {"command": ["true"]}}}),
    # placement
    "toleration without a key": pod(tolerations=[{"value": "x", "operator": "Equal"}]),
    "seconds of another effect": pod(
        tolerations=[
            {"key": "a", "operator": "Exists", "effect": "NoSchedule", "tolerationSeconds": 1}
        ]
    ),
    "value of any": pod(tolerations=[{"key": "a", "operator": "Exists", "value": "x"}]),
    "toleration key with a space": pod(tolerations=[{"key": "a b", "operator": "Exists"}]),
    "no values": node_affinity({"key": "zone", "operator": "In"}),
    "values of Exists": node_affinity({"key": "zone", "operator": "Exists", "values": ["a"]}),
    "unknown operator": node_affinity({"key": "zone", "operator": "in", "values": ["a"]}),
    "no terms": pod(
        affinity={
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}
            }
        }
    ),
    "weight": pod(
        affinity={
            "nodeAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 0, "preference": {}}]
            }
        }
    ),
    "no topology key": pod(
        affinity={
            "podAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": [
                    {"labelSelector": {"matchLabels": {"a": "b"}}}
                ]
            }
        }
    ),
    "no skew": spread(maxSkew=0),
    "domains without a hard limit": spread(minDomains=2, whenUnsatisfiable="ScheduleAnyway"),
    "constraint twice": pod(
        topologySpreadConstraints=[
            {"maxSkew": skew, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
            for skew in (1, 2)
        ]
    ),
    # the pod as a whole
    "deadline of nothing": pod(activeDeadlineSeconds=0),
    "negative user": pod(securityContext={"runAsUser": -1}),
    "capability without escalation": trainer(
        securityContext={
            "capabilities": {"add": ["CAP_SYS_ADMIN"]},
            "allowPrivilegeEscalation": False,
        }
    ),
    "profile without a path": trainer(securityContext={"seccompProfile": {"type": "Localhost"}}),
    "host users": pod(hostUsers=False, hostPID=True),
    "host processes": pod(hostPID=True, shareProcessNamespace=True),
    "other port of the host": both(
        {"hostNetwork": True}, {"ports": [{"containerPort": 80, "hostPort": 81}]}
    ),
    "priority": pod(priority=100),
    "preemption policy without a class": pod(preemptionPolicy="Never"),
    "preemption without a class": pod(preemptionPolicy="PreemptLowerPriority"),
    "scheduling gate": pod(schedulingGates=[{"name": "a b"}]),
    "host users and network": pod(hostUsers=False, hostNetwork=True),
    "stop signal without a system": trainer(lifecycle={"stopSignal": "SIGUSR1"}),
    "stop signal": both({"os": {"name": "linux"}}, {"lifecycle": {"stopSignal": "SIGUSR1"}}),
    "stop signal of another system": both(
        {"os": {"name": "windows"}}, {"lifecycle": {"stopSignal": "SIGUSR1"}}
    ),
    "unknown system": pod(os={"name": "plan9"}),
    "node name in capitals": pod(nodeName="Node"),
    "part of a volume with steps back": both(
        _WITH_DATA, {"volumeMounts": [_ON_DATA | {"subPath": "a/../b"}]}
    ),
    "two parts of a volume": both(
        _WITH_DATA, {"volumeMounts": [_ON_DATA | {"subPath": "a", "subPathExpr": "b"}]}
    ),
    "restart on resize": trainer(
        resizePolicy=[{"resourceName": "cpu", "restartPolicy": "RestartContainer"}]
    ),
    "resize of a GPU": trainer(
        resizePolicy=[{"resourceName": "nvidia.com/gpu", "restartPolicy": "NotRequired"}]
    ),
    "mode of files": volume(projected={"defaultMode": 1000, "sources": []}),
    "part of a pod's metadata": volume(
        downwardAPI={"items": [{"path": "a", "fieldRef": {"fieldPath": "spec.nodeName"}}]}
    ),
    "image volume": volume(image={"reference": "model:1"}),
    "image volume without an image": volume(image={"pullPolicy": "Always"}),
    "affinity of no namespace": pod(
        affinity={
            "podAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": [
                    {"topologyKey": "zone", "namespaces": ["A"]}
                ]
            }
        }
    ),
    "order of labels": spread(
        labelSelector={"matchExpressions": [{"key": "a", "operator": "Gt", "values": ["1"]}]}
    ),
    "header": probe(httpGet={**HTTP, "httpHeaders": [{"name": "a b", "value": "c"}]}),
    "probe without a path": probe(httpGet={"port": 80}),
    "cpu limit alone": amounts({"cpu": "100m"}),
    "sub-milli cpu": amounts({"cpu": "0.0001"}),
    "long annotation": {"metadata": {"annotations": {"a": "x" * 300_000}}},
    "host name in capitals": pod(hostnameOverride="Node"),
    "label keys without a selector": spread(matchLabelKeys=["a"]),
    "label keys of an affinity": pod(
        affinity={
            "podAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": [
                    {"topologyKey": "zone", "matchLabelKeys": ["a"]}
                ]
            }
        }
    ),
    "projection of nothing": volume(projected={"sources": [{}]}),
    "sysctl": pod(securityContext={"sysctls": [{"name": "Net Core", "value": "1"}]}),
    "init container restarted on failure": init(restartPolicy="OnFailure"),
    "colon in a mount path": both(
        _WITH_DATA, {"volumeMounts": [{"name": "data", "mountPath": "/d:x"}]}
    ),
    "overhead without a class": pod(overhead={"cpu": "100m"}),
}
