{{/*
One service of ours: its pods and the Service in front of them. Arguments:
  root         the chart's top
  service      its word: gateway, tokenizer, ...
  kind         Deployment or StatefulSet
  replicas
  recreate     true where two at a time must not be
  ports        list of {name, port}; "metrics" among them
  wiring       settings that the chart gives, by name; the values' own win
  secretEnv    list of environment entries that come from secrets
  withModel    true where /models/current is needed
  servesEarly  true where others must reach it before it is ready
*/}}
{{- define "reprise.workload" -}}
{{- $root := .root -}}
{{- $values := index $root.Values .service -}}
{{- $name := printf "%s-%s" (include "reprise.fullname" $root) .service -}}
{{- $prefix := printf "REPRISE_%s_" (upper .service) -}}
{{- $settings := merge (dict) $values.settings .wiring (dict "log_level" $root.Values.logLevel) -}}
apiVersion: apps/v1
kind: {{ .kind }}
metadata:
  name: {{ $name }}
  labels: {{- include "reprise.labels" . | nindent 4 }}
spec:
  replicas: {{ .replicas }}
  {{- if eq .kind "StatefulSet" }}
  serviceName: {{ $name }}
  podManagementPolicy: Parallel
  {{- else if .recreate }}
  strategy: {type: Recreate}
  {{- end }}
  selector:
    matchLabels: {{- include "reprise.selector" . | nindent 6 }}
  template:
    metadata:
      labels: {{- include "reprise.labels" . | nindent 8 }}
    spec:
      # Names such as REPRISE_STORE_PORT_... would only be in the way.
      enableServiceLinks: false
      automountServiceAccountToken: false
      terminationGracePeriodSeconds: 30
      securityContext:
        runAsNonRoot: true
        runAsUser: 10001
        runAsGroup: 10001
        fsGroup: 10001
        fsGroupChangePolicy: OnRootMismatch
        seccompProfile: {type: RuntimeDefault}
      {{- with $root.Values.image.pullSecrets }}
      imagePullSecrets: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with include "reprise.podPlacement" $values }}
      {{- . | nindent 6 }}
      {{- end }}
      {{- if .withModel }}
      initContainers:
        - name: model
          image: {{ include "reprise.image" (dict "root" $root "service" "worker") }}
          imagePullPolicy: {{ $root.Values.image.pullPolicy }}
          # The link is the pod's own: pods that share a claim may want different models.
          command:
            - python
            - -m
            - reprise_worker.prepare
            - --model={{ $root.Values.model.id }}
            - --cache-dir=/models
            - --link=/model/current
            - --quiet
          {{- $token := $root.Values.model.tokenSecret }}
          {{- if or $token.name $root.Values.model.env }}
          env:
            {{- if $token.name }}
            - name: HF_TOKEN
              valueFrom:
                secretKeyRef: {name: {{ $token.name }}, key: {{ $token.key }}}
            {{- end }}
            {{- with $root.Values.model.env }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
          {{- end }}
          securityContext: {{- include "reprise.containerSecurity" $root | nindent 12 }}
          volumeMounts:
            - {name: tmp, mountPath: /tmp}
            - {name: models, mountPath: /models}
            - {name: model, mountPath: /model}
      {{- end }}
      containers:
        - name: {{ .service }}
          image: {{ include "reprise.image" . }}
          imagePullPolicy: {{ $root.Values.image.pullPolicy }}
          env:
            {{- range $key, $value := $settings }}
            - name: {{ $prefix }}{{ upper $key }}
              value: {{ include "reprise.settingValue" $value | quote }}
            {{- end }}
            {{- with .secretEnv }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
          ports:
            {{- range .ports }}
            - {name: {{ .name }}, containerPort: {{ .port }}}
            {{- end }}
          # A large model takes minutes to load; the process answers /healthz from its start.
          startupProbe:
            httpGet: {path: /healthz, port: metrics}
            periodSeconds: 2
            failureThreshold: 60
          readinessProbe:
            httpGet: {path: /readyz, port: metrics}
            periodSeconds: 2
            timeoutSeconds: 2
          livenessProbe:
            httpGet: {path: /healthz, port: metrics}
            periodSeconds: 10
            timeoutSeconds: 5
          resources: {{- toYaml $values.resources | nindent 12 }}
          securityContext: {{- include "reprise.containerSecurity" $root | nindent 12 }}
          volumeMounts:
            - {name: tmp, mountPath: /tmp}
            {{- if .withModel }}
            {{- /* The worker keeps the digest of the weights beside them. */}}
            - {name: models, mountPath: /models, readOnly: {{ ne .service "worker" }}}
            - {name: model, mountPath: /model, readOnly: true}
            {{- end }}
      volumes:
        - name: tmp
          emptyDir: {}
        {{- if .withModel }}
        - name: model
          emptyDir: {}
        - name: models
          {{- if $root.Values.model.existingClaim }}
          persistentVolumeClaim: {claimName: {{ $root.Values.model.existingClaim }}}
          {{- else }}
          emptyDir: {}
          {{- end }}
        {{- end }}
---
apiVersion: v1
kind: Service
metadata:
  name: {{ $name }}
  labels: {{- include "reprise.labels" . | nindent 4 }}
spec:
  type: {{ dig "service" "type" "ClusterIP" $values }}
  {{- if .servesEarly }}
  publishNotReadyAddresses: true
  {{- end }}
  selector: {{- include "reprise.selector" . | nindent 4 }}
  ports:
    {{- range .ports }}
    - {name: {{ .name }}, port: {{ .servicePort | default .port }}, targetPort: {{ .name }}}
    {{- end }}
{{- end }}
